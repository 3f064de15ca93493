// The lowest stage that fits, as zero_full/fit/choice.py and words.py: no elements of the page in here.
// A machine is {world, hosts, memory, hostMemory, disk}, in bytes, the last two null if nothing waits there. A run is
// {sequences, context, checkpoints, microBatches, precision}. Everything is in `zeroFit`.

const zeroFit = (() => {
  "use strict"
  const data = zeroFitData, human = zeroPlan.human
  const PATH = "/local_nvme"
  const grouped = (number) => number.toLocaleString("en")

  const rungs = ({ hostMemory, disk }) => data.ladder.filter(([, place]) =>
    (!place || hostMemory !== null) && (place !== "nvme" || disk !== null))

  function configOf(run, stage, place) {
    const path = place === "nvme" ? { nvme_path: PATH } : {}
    const away = place ? { offload_optimizer: { device: place, ...path } } : {}
    return {
      train_micro_batch_size_per_gpu: run.sequences,
      gradient_accumulation_steps: run.microBatches,
      gradient_clipping: 1,
      optimizer: data.optimizer,
      ...data.precisions[run.precision].config,
      zero_optimization: { stage, ...away },
    }
  }

  const WAITS = { "": "", cpu: ", state on the host", nvme: ", state in a file" }

  function judged(plan, machine) {
    const onHost = machine.world / machine.hosts, places = [["on the GPU", plan.peak, machine.memory]]
    if (plan.host) places.push(["on the host", onHost * plan.host, machine.hostMemory || 0])
    if (plan.disk) places.push(["on the disk", onHost * plan.disk, machine.disk || 0])
    const over = places.filter(([, size, room]) => size > room)
    if (over.length) {
      return ["no", over.map(([place, size, room]) => `${human(size - room)} too much ${place}`).join(" and ")]
    }
    const tight = places.filter(([, size, room]) => data.tight * (room - size) < room)
    if (tight.length) {
      return ["tight", tight.map(([place, size, room]) => `only ${human(room - size)} left ${place}`).join(" and ")]
    }
    const left = `${human(machine.memory - plan.peak)} left on the GPU`
    return plan.activations === null ? ["perhaps", `${left} for activations, which are not known`] : ["yes", left]
  }

  const best = (tried) => tried.find(({ verdict }) => verdict === "yes" || verdict === "perhaps")

  function checkPositions({ family, sizes: { positions } }, context) {
    if (positions === undefined || context <= positions) return
    const key = zeroFitShape.keyOf(family, "positions"), [asked, most] = [context, positions].map(grouped)
    throw Error(`tokens in each: ${asked} tokens exceed ${key}, ${most}`)
  }

  function fit(shape, machine, run) {
    checkPositions(shape, run.context)
    const model = zeroFitShape.modelOf(shape), tried = []
    const activations = zeroFitShape.activationsOf(shape, run, data.precisions[run.precision].bytes)
    for (const [stage, place] of rungs(machine)) {
      if (place && best(tried)) break
      const { sequences: batch, microBatches, precision } = run
      const kind = { precision, optimizer: "adamw", stage, state: place }
      const planned = { ...kind, batch, microBatches, ranks: machine.world }
      const plan = { ...zeroPlan.ofModel(model, activations || 0, planned), activations }
      const [verdict, reason] = judged(plan, machine)
      const name = `stage ${stage}${WAITS[place]}`
      tried.push({ name, stage, config: configOf(run, stage, place), plan, verdict, reason })
    }
    const tight = tried.find(({ verdict }) => verdict === "tight")
    return { numel: model.numel, tried, chosen: best(tried) || tight || null }
  }

  function torchrun({ world, hosts }) {
    const each = world / hosts
    if (hosts === 1) return `torchrun --standalone --nproc-per-node ${each} train.py`
    const meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1"
    return `torchrun --nnodes ${hosts} --nproc-per-node ${each} ${meeting} train.py`
  }

  function snippet(shape, { precision, checkpoints }) {
    const auto = shape.family.model.endsWith("ForMaskedLM") ? "AutoModelForMaskedLM" : "AutoModelForCausalLM"
    const dtype = data.precisions[precision].bytes === 4 ? "torch.float32" : "torch.bfloat16"
    return [
      "import torch",
      "import zero_full",
      `from transformers import AutoConfig, ${auto}`,
      "",
      'config = AutoConfig.from_pretrained("config.json")',
      "with zero_full.Init():",
      `    model = ${auto}.from_config(config, dtype=${dtype})`,
      ...(checkpoints ? ["model.gradient_checkpointing_enable()"] : []),
      "model.train()",
      'engine, optimizer, _, _ = zero_full.initialize(model=model, config="ds.json")',
    ].join("\n")
  }

  return { fit, torchrun, snippet }
})()
