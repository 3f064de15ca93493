// The page that checks a configuration: a text, and beside its lines what config_check.js says of them.

(() => {
  "use strict"
  const form = document.getElementById("checker")
  const result = document.getElementById("checker-result")
  const field = (name) => form.elements[name]
  const NAMES = { unread: "not read", unknown: "not looked at", unfilled: "to fill in" } // where a kind is called otherwise
  const LOUD = ["refused", "unfilled", "no effect", "assumed"]
  const SIGNS = { ok: "✓", default: "=", unread: "–", "no effect": "!", assumed: "!", unfilled: "…", refused: "✗", unknown: "?" }
  const EXAMPLE = `{
  "train_batch_size": "auto",
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
  "gradient_cliping": 1.0,
  "zero_optimization": {
    "stage": 2,                      // comments are fine
    "offload_param": {"device": "cpu"},
    "allgather_bucket_size": 2e8,
    "overlap_comm": true
  },
  "flops_profiler": {"enabled": true, "profile_step": 1},
}
`

  function made(tag, kind, text = "") {
    const element = document.createElement(tag)
    element.className = kind
    element.textContent = text
    return element
  }

  // Text in which `this` is code.
  const written = (text) => text.split("`").map((part, place) => (place % 2 ? made("code", "", part) : part))

  // The nearest key of the reference around this one.
  function anchorOf(path) {
    for (let length = path.length; length; length--) {
      const key = path.slice(0, length).join(".")
      if (zeroConfig.keys.includes(key)) return key
    }
    return ""
  }

  function shownVerdict({ path, kind, message, remedy }) {
    const line = made("p", `verdict ${kind.replace(" ", "-")}`)
    line.append(made("b", "", `${SIGNS[kind]} ${NAMES[kind] || kind}`), " ")
    const name = path.join("."), anchor = anchorOf(path)
    const key = made(anchor ? "a" : "span", "key", name)
    if (anchor) key.href = `configuration.html#${anchor}`
    line.append(key)
    if (message) line.append(name ? ": " : "", ...written(message))
    if (remedy) line.append(message ? "; " : ": ", made("strong", "", remedy))
    return line
  }

  function shownLine(text, number, verdicts, loud) {
    const told = loud ? verdicts.filter(({ kind }) => LOUD.includes(kind)) : verdicts
    const item = made("li", told.some(({ kind }) => kind === "refused") ? "wrong" : "")
    item.value = number
    item.hidden = loud && !told.length
    const said = made("div", "said")
    said.append(...told.map(shownVerdict))
    item.append(made("code", "", text || " "), said)
    return item
  }

  const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`

  // As `python -m zero_full check` counts.
  function tally(verdicts) {
    const count = (...kinds) => verdicts.filter(({ kind }) => kinds.includes(kind)).length
    const mistakes = count("refused"), warnings = count("no effect", "assumed"), unknown = count("unknown")
    const unfilled = count("unfilled"), verb = unfilled === 1 ? "is" : "are"
    const parts = [mistakes ? counted(mistakes, "mistake") : unknown ? "nothing wrong so far" : "ok"]
    if (unfilled && mistakes) parts.push(`${counted(unfilled, "key")} to fill in`)
    else if (unfilled) parts[0] += ` once ${counted(unfilled, "key")} ${verb} filled in`
    if (warnings) parts.push(counted(warnings, "warning"))
    if (unknown) parts.push(`${counted(unknown, "key")} not looked at, only \`python -m zero_full check\` knows`)
    return parts.join(", ")
  }

  function update() {
    const answer = result.querySelector(".answer"), lines = result.querySelector(".lines"), text = field("text").value
    const asked = field("ranks").value.trim()
    answer.classList.remove("wrong")
    lines.replaceChildren()
    if (!text.trim()) {
      answer.textContent = "Paste a configuration above."
      return
    }
    if (asked && !/^[1-9][0-9]{0,6}$/.test(asked)) {
      answer.textContent = "ranks: give a whole number of at least 1, or leave it empty."
      answer.classList.add("wrong")
      return
    }
    const { verdicts, world } = zeroCheck.check(text, asked ? BigInt(asked) : null)
    answer.replaceChildren(...written(`On ${counted(Number(world), "rank")}: ${tally(verdicts)}.`))
    answer.classList.toggle("wrong", verdicts.some(({ kind }) => kind === "refused"))
    const loud = field("loud").checked
    lines.append(...text.replace(/\n$/, "").split("\n").map((line, place) =>
      shownLine(line, place + 1, verdicts.filter((each) => each.line === place + 1), loud)))
  }

  async function opened() {
    const [file] = field("file").files
    if (!file) return
    field("text").value = (await file.text()).replace(/^\uFEFF/, "").replace(/\r\n?/g, "\n")
    update()
  }

  form.addEventListener("input", (event) => (event.target === field("file") ? opened() : update()))
  form.addEventListener("submit", (event) => event.preventDefault())
  field("example").addEventListener("click", () => {
    field("text").value = EXAMPLE
    update()
  })
  update()
})()
