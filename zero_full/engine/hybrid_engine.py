"""The engine of runs with `hybrid_engine.enabled`: its `generate` gathers the parameters for each call."""

from typing import Any

from zero_full.engine.engine import Engine


class HybridEngine(Engine):
    """An engine with `generate`, as DeepSpeed's hybrid engine. Everything else is the engine's."""

    def generate(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the module's `generate` inside `generation`, with LoRA adapters merged. Every rank calls this.

        Ranks may generate different numbers of tokens if `hybrid_engine.pin_parameters` is true. If it is
        false, parameters are gathered in each forward, and adapters are not merged.
        """
        section = self.config.hybrid_engine
        memory = None if section.pin_parameters else 0
        with self.generation(memory, merge_adapters=section.pin_parameters) as model:
            generate: Any = model.generate
            outputs = generate(*inputs, **named_inputs)
        if section.release_inference_cache:
            self.empty_partition_cache()
        return outputs
