"""What the animated step says at each frame."""

BETWEEN = {
    0: "Between two steps every rank holds all parameters and all of Adam's state: two averages a parameter.",
    1: "Between two steps every rank holds all parameters, but Adam's state only for its own slice.",
    2: "Between two steps a rank holds what it holds at stage 1: the difference comes with the gradients.",
    3: "Between two steps a rank holds its own slices and nothing else.",
}
REDUCED = {
    1: "Each rank receives the average of its own slice. Its whole gradients stay until zero_grad.",
    2: "Each owner receives the average of its slice. The whole gradient is let go, while backward goes on.",
    3: "Each owner receives the average of its slice. The whole gradient and the others' slices are let go.",
}
ADAM = {
    0: "Every rank steps every parameter, all with the same average, and so ends with the same values.",
    1: "Each rank steps the slice for which it has the state. Everywhere else its parameters are now old.",
    2: "Each rank steps the slice for which it has the state. Everywhere else its parameters are now old.",
    3: "Each rank steps its own slices. There is nothing else that could be old.",
}
DONE = {
    0: "Gradients are let go, and the next step can begin.",
    1: "Gradients are let go, and the next step can begin.",
    2: "The own slices' gradients are let go, and the next step can begin.",
    3: "The own slices' gradients are let go, and the next step can begin.",
}


def caption(stage: int, what: str, layers: list[int]) -> tuple[str, str]:
    """A title, and a sentence or two."""
    one = f"layer {layers[0]}" if len(layers) == 1 else "all layers"
    gathered = "Every rank sends its slice of the layer to the three others: now all can compute with it."
    if what == "all_gather" and stage < 3:
        gathered = "Every rank sends its new slice to the three others: all parameters are new everywhere."
    captions = {
        "start": ("Between steps", BETWEEN[stage]),
        "all_gather": (f"All-gather: {one}", gathered),
        "forward": (f"Forward: {one}", "Every rank computes on data of its own."),
        "forwarded": (f"Release: {one}", "It has been used. The other ranks' slices are let go."),
        "backward": (f"Backward: {one}", "The layer's gradient is computed."),
        "gradient": (f"Gradient: {one}", "Every rank has a gradient from its own data: four different ones."),
        "all_reduce": (
            f"All-reduce: {one}",
            "Gradients are added up and divided by four: all have the average.",
        ),
        "reduce_scatter": (f"Reduce-scatter: {one}", REDUCED.get(stage, "")),
        "stepped": ("Adam", ADAM[stage]),
        "done": ("Step done", "The averaged slices have been used and are let go."),
        "zero_grad": ("zero_grad", DONE[stage]),
    }
    return captions[what]
