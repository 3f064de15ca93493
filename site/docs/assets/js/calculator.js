// The calculator's page: a form, two pictures, a table. What it computes is in calculator_plan.js.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroCalculatorPage`.

const zeroCalculatorPage = (() => {
  "use strict"
  const data = zeroCalculator, human = zeroPlan.human
  const form = document.getElementById("calculator")
  const result = document.getElementById("calculator-result")
  const find = (selector) => result.querySelector(selector)
  const SHAPE = ["layers", "width", "heads", "vocabulary", "context"] // as presets list it
  const KEPT = { parameters: "parameters", gradients: "gradients", master: "master", moments: "optimizer's state" }
  const PASSING = {
    gathered: "gathered parameters",
    buckets: "unreduced gradients",
    activations: "activations",
    update: "optimizer temporaries",
  }
  const NAMES = { ...KEPT, ...PASSING }
  const LOOKS = { gathered: "parameters", buckets: "gradients", update: "moments" } // striped, in that kind's colour

  // What the form says --------------------------------------------------------------------------

  // Commas, _ and spaces are for groups of three digits: 7,5B is nobody's 75 billion.
  function parsedCount(text) {
    const found = /^\s*(\d{1,3}(?:[,_ ]\d{3})+|\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*$/i.exec(text)
    const unit = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 }
    return found ? Math.round(Number(found[1].replace(/[,_ ]/g, "")) * unit[found[2].toLowerCase()]) : NaN
  }

  function read() {
    const field = (name) => form.elements[name].value, number = (name) => Number(field(name))
    const run = { ranks: number("ranks"), batch: number("batch"), microBatches: number("microBatches") }
    const state = {
      run: { ...run, precision: field("precision"), optimizer: field("optimizer") },
      chosen: number("stage"),
      offload: form.elements.offload.checked,
    }
    if (field("known") === "count") return { ...state, count: parsedCount(field("count")) }
    return { ...state, shape: Object.fromEntries(SHAPE.map((name) => [name, number(name)])) }
  }

  // A link has the form's values, and opens the page with them.
  const NUMBERS = ["ranks", "batch", "microBatches"], CHOICES = ["known", "precision", "optimizer", "stage"]

  function address() {
    const known = form.elements.known.value, model = known === "count" ? ["count"] : SHAPE
    const fields = [...CHOICES, ...model, ...NUMBERS].map((name) => [name, form.elements[name].value])
    const offload = form.elements.offload.checked ? [["offload", "1"]] : []
    return `#${new URLSearchParams([...fields, ...offload])}`
  }

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1))
    if (!given.has("known")) return false // a heading of this page, or nothing
    form.elements.offload.checked = false
    fixToOffload(false)
    for (const name of [...SHAPE, "count", ...NUMBERS]) if (given.has(name)) form.elements[name].value = given.get(name)
    for (const name of CHOICES) {
      const field = form.elements[name], options = [...(field.options || field)].map((option) => option.value)
      if (options.includes(given.get(name))) field.value = given.get(name)
    }
    form.elements.offload.checked = given.get("offload") === "1"
    form.elements.preset.value = ""
    return true
  }

  function copy() {
    const told = find(".share [role=status]")
    const done = () => (told.textContent = "Copied.")
    const failed = () => (told.textContent = "The browser does not allow it: copy the address of this page.")
    history.replaceState(null, "", address())
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(done, failed)
    else failed()
  }

  function problemOf({ shape, count }) {
    const asked = [...form.elements].filter((field) => field.willValidate && !field.closest("[hidden]"))
    const wrong = asked.find((field) => !field.checkValidity())
    if (wrong && wrong.min) {
      const name = wrong.closest("label").textContent.trim()
      return `${name}: give a whole number from ${wrong.min} to ${Number(wrong.max).toLocaleString("en")}.`
    }
    if (shape && shape.width % shape.heads) {
      return `width: ${shape.width} cannot be divided among ${shape.heads} heads.`
    }
    const isCount = shape || (count >= 1 && count <= 1e13)
    return isCount ? "" : "parameters: give a number from 1 to 1e13, such as 7e9, 7B or 7.5B."
  }

  // One column for each stage, and one for offload: bytes by kind. null: not known.
  function columnsOf({ shape, count, run, offload }) {
    const columns = data.stages.map((stage) => {
      const bytes = shape ? zeroPlan.ofShape(shape, { ...run, stage }) : zeroPlan.ofCount(count, { ...run, stage })
      return { name: `stage ${stage}`, stage, ...bytes }
    })
    return offload ? [...columns, offloadColumn(shape, count, run)] : columns
  }

  function offloadColumn(shape, count, run) {
    const away = zeroPlan.offloaded(shape ? zeroPlan.countOf(shape) : count, run)
    return {
      ...{ name: `stage ${data.offload.stage}, offload`, stage: "offload", away },
      ...{ parameters: away.parameters, gradients: 0, master: 0, moments: 0, kept: away.parameters },
      ...{ gathered: null, buckets: null, update: null, peak: null },
      activations: shape ? zeroPlan.activationsOf(shape, run) : null,
      sent: Math.ceil(away.sentByAll / run.ranks),
    }
  }

  const isBound = (column) => column.stage === 3 && column.peak === null // of what it sends, only the most is known

  // As much of the peak as is known.
  const known = (column) => column.peak ?? column.kept + (column.activations || 0)

  // Pictures ------------------------------------------------------------------------------------

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/"/g, "&quot;")

  // A part of a bar, or a sample for the legend.
  function box(kind, x, y, width, height) {
    const place = `x="${x.toFixed(1)}" y="${y}" width="${width.toFixed(1)}" height="${height}"`
    const drawn = `<rect class="${width > 4 ? "part " : ""}${LOOKS[kind] || kind}" ${place}/>`
    if (!(kind in LOOKS)) return drawn
    const stripes = []
    for (let at = 4; at < width - 1; at += 7) {
      stripes.push(`<line class="stripe" x1="${x + at}" x2="${x + at}" y1="${y + 1}" y2="${y + height - 1}"/>`)
    }
    return drawn + stripes.join("")
  }

  function partsOf(column) {
    const inBackward = (column.gathered || 0) + (column.buckets || 0) + (column.activations || 0)
    const stepping = (column.update || 0) > inBackward
    const passing = stepping ? ["update"] : ["gathered", "buckets", "activations"]
    return [...Object.keys(KEPT), ...passing].map((kind) => [kind, column[kind] || 0]).filter(([, size]) => size > 0)
  }

  // Horizontal bars: `rows` are {text, chosen, parts}, `limits` sizes in GB to draw lines at.
  function bars(rows, most, limits, description) {
    const width = Math.max(280, result.clientWidth), top = limits.length ? 20 : 4, step = 48
    const scale = (size) => (size / most) * (width - 2)
    const lines = limits.map((size) => [size, scale(size * 1e9)]).filter(([, x]) => x < width)
    const drawn = [...names(lines, width)]
    rows.forEach((row, place) => {
      const y = top + place * step
      drawn.push(`<text x="0" y="${y + 13}"${row.chosen ? ' class="chosen"' : ""}>${escaped(row.text)}</text>`)
      drawn.push(`<rect class="ground" x="0" y="${y + 19}" width="${width}" height="22"/>`)
      let x = 0
      for (const [kind, size] of row.parts) {
        const wide = Math.min(scale(size), width - x)
        if (wide > 0.2) drawn.push(box(kind, x, y + 19, wide, 22))
        x += wide
      }
      drawn.push(...lines.map(([, at]) => `<line class="limit" x1="${at}" x2="${at}" y1="${y + 17}" y2="${y + 43}"/>`))
    })
    const height = top + step * rows.length
    const head = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img"`
    return `${head} aria-label="${escaped(description)}">${drawn.join("")}</svg>`
  }

  // Names above the lines, as far as there is room for them.
  function names(lines, width) {
    const shown = []
    let free = 0
    for (const [size, x] of lines) {
      const start = Math.max(0, Math.min(x - 20, width - 48))
      if (start < free) continue
      shown.push(`<text x="${start}" y="12">${size} GB</text>`)
      free = start + 52
    }
    return shown
  }

  function heldRow(column, chosen) {
    const peak = column.peak === null ? "" : `, ${human(column.peak)} at the peak`
    return { text: `${column.name}: ${human(column.kept)} kept${peak}`, chosen, parts: partsOf(column) }
  }

  function hostRow({ hostGradients, hostState }) {
    const parts = [["gradients", hostGradients], ["moments", hostState]]
    return { text: `and on the host: ${human(hostGradients + hostState)}`, chosen: true, parts }
  }

  function draw(columns, chosen, ranks) {
    const isChosen = (column) => column.stage === chosen
    const told = (rows) => rows.map((row) => row.text).join(". ")
    const held = columns.flatMap((column) => [
      heldRow(column, isChosen(column)),
      ...(column.away ? [hostRow(column.away)] : []),
    ])
    const wanted = find("[name=zoom]").checked ? columns.filter(isChosen) : columns
    const most = 1.04 * Math.max(...wanted.map(known))
    find(".held").innerHTML = bars(held, most, data.sizes, `What one rank holds. ${told(held)}.`)
    const sent = columns.map((column) => ({
      text: `${column.name}: ${isBound(column) ? "at most " : ""}${human(column.sent)}`,
      chosen: isChosen(column),
      parts: [["sent", column.sent]],
    }))
    const highest = 1.04 * Math.max(1, ...columns.map((column) => column.sent))
    find(".sent").innerHTML = bars(sent, highest, [], `What one of ${ranks} ranks sends in a step. ${told(sent)}.`)
    legend(new Set(held.flatMap((row) => row.parts.map(([kind]) => kind))))
  }

  function legend(kinds) {
    const sample = (kind) => `<svg width="22" height="14">${box(kind, 0, 0, 22, 14)}</svg>`
    const entries = Object.keys(NAMES).filter((kind) => kinds.has(kind))
    find(".legend").innerHTML = entries.map((kind) => `<li>${sample(kind)}${NAMES[kind]}</li>`).join("")
  }

  // Words and numbers ---------------------------------------------------------------------------

  function answer(column, state) {
    const numel = state.shape ? zeroPlan.countOf(state.shape) : state.count
    const away = column.away ? `, and ${human(column.away.hostGradients + column.away.hostState)} on the host` : ""
    const open = "What a step needs beside that is not all known"
    const more = column.peak === null ? open : `${human(column.peak)} at a step's peak`
    find(".answer").textContent =
      `${numel.toLocaleString("en")} parameters, ${column.name}: each rank keeps ${human(column.kept)}${away}. ${more}.`
    find(".fits").innerHTML = data.sizes.map((size) => fit(size, column)).join("")
  }

  function fit(size, column) {
    const left = size * 1e9 - known(column), open = column.peak === null
    const isTight = data.tight * left < size * 1e9
    const word = left < 0 ? "no" : open ? "perhaps" : isTight ? "tight" : "yes"
    const detail = left < 0 ? `${human(-left)} too much` : `${human(left)} left${open ? " for the rest" : ""}`
    return `<li class="${word}"><b>${size} GB: ${word}</b>${detail}</li>`
  }

  function numbers(columns, chosen) {
    const exact = columns.find((column) => column.stage === chosen)
    const mark = (column) => (column === exact ? ' class="chosen"' : "")
    const shown = (column, kind) => {
      if (column[kind] === null) return "not known"
      return (kind === "sent" && isBound(column) ? "at most " : "") + human(column[kind])
    }
    const row = (name, kind, total = "") => {
      const cells = columns.map((column) => `<td${mark(column)}>${shown(column, kind)}</td>`).join("")
      const last = exact[kind] === null ? "" : exact[kind].toLocaleString("en")
      return `<tr${total}><th scope="row">${name}</th>${cells}<td data-kind="${kind}">${last}</td></tr>`
    }
    const total = ' class="total"'
    const rows = [
      ...Object.keys(KEPT).map((kind) => row(KEPT[kind], kind)),
      row("kept between steps", "kept", total),
      ...Object.keys(PASSING).map((kind) => row(PASSING[kind], kind)),
      row("peak", "peak", total),
      row("sent in a step", "sent", total),
    ]
    const names = columns.map((column) => `<th scope="col"${mark(column)}>${column.name}</th>`).join("")
    const head = `<tr><th scope="col">on one rank</th>${names}<th scope="col">${exact.name}, bytes</th></tr>`
    find(".numbers").innerHTML = `<thead>${head}</thead><tbody>${rows.join("")}</tbody>`
    const note = "Gradients count as kept: they are there until zero_grad."
    find(".note").textContent = exact.away ? hostNote(exact.away) : note
  }

  function hostNote(away) {
    const held = `gradients ${human(away.hostGradients)}, master and optimizer's state ${human(away.hostState)}`
    const moved = `${human(away.downByAll)} down and ${human(away.upByAll)} up`
    const open = "Not counted: unreduced gradients"
    return `On the host of each rank: ${held}. All ranks together copy ${moved} in a step. ${open}.`
  }

  // What would wait elsewhere, with zero_full's offload_optimizer.
  function elsewhere({ shape, run, chosen }) {
    const told = (state) => zeroPlan.waiting(shape, { ...run, stage: chosen, state })
    const host = told("cpu"), file = told("nvme")
    const moved = `${human(host.down)} go down and ${human(host.up)} up in a step`
    const waits = `${human(file.disk)} wait in its file, and steps read and write what host memory does not hold`
    return ` With offload_optimizer "cpu", ${human(host.host)} of a rank wait on the host, and ${moved}. ` +
      `With "nvme", ${waits}, and ${human(file.host)} on the host.`
  }

  const python = (value) => JSON.stringify(value).replace(/\btrue\b/g, "True").replace(/([,:])/g, "$1 ")

  // Python that prints what the table says; tests/site runs it.
  function code(state) {
    if (state.offload) return offloadCode(state)
    return state.shape ? planCode(state) : ""
  }

  function offloadCode({ shape, count, run }) {
    return [
      "from zero_min import formula",
      `sizes, ranks, micro_batches = [${shape ? zeroPlan.countOf(shape) : count}], ${run.ranks}, ${run.microBatches}`,
      "print(formula.held(2, sizes, ranks, formula.MIXED))  # gradients and optimizer: on the host",
      "print(formula.sent(2, sizes, ranks, micro_batches, formula.MIXED) + formula.flag(ranks))  # by all ranks",
      "print(formula.moved(sizes, ranks, micro_batches))  # by all ranks, down and up",
    ].join("\n")
  }

  function planCode({ shape, run, chosen }) {
    const config = {
      train_micro_batch_size_per_gpu: run.batch,
      gradient_accumulation_steps: run.microBatches,
      optimizer: data.optimizers[run.optimizer].config,
      ...data.precisions[run.precision].config,
      zero_optimization: { stage: chosen },
    }
    return [
      "import torch",
      "from zero_full.plan import plan",
      "from zero_min.gpt import GPT, GPTConfig",
      'with torch.device("meta"):',
      `    model = GPT(GPTConfig(${SHAPE.map((name) => `${name}=${shape[name]}`).join(", ")}))`,
      `    tokens = torch.empty(${run.batch}, ${shape.context}, dtype=torch.int64)`,
      `config = ${python(config)}`,
      `print(plan(model, config, ${run.ranks}, inputs=[tokens, tokens]).table())`,
    ].join("\n")
  }

  // The page --------------------------------------------------------------------------------------

  function update() {
    fixToOffload(form.elements.offload.checked)
    const known = form.elements.known.value, fixed = "[name=precision], [name=optimizer], [name=stage]"
    for (const part of form.querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== known
    for (const field of form.querySelectorAll(fixed)) field.disabled = form.elements.offload.checked
    const state = read(), problem = problemOf(state)
    result.classList.toggle("wrong", problem !== "") // nothing of an older answer stays beside a mistake
    find(".answer").classList.toggle("wrong", problem !== "")
    if (problem) {
      find(".answer").textContent = problem
      find(".fits").innerHTML = ""
      return
    }
    const columns = columnsOf(state), chosen = state.offload ? "offload" : state.chosen
    answer(columns.find((column) => column.stage === chosen), state)
    draw(columns, chosen, state.run.ranks)
    numbers(columns, chosen)
    if (state.shape && !state.offload && chosen > 0) find(".note").textContent += elsewhere(state)
    const text = code(state)
    find(".check").hidden = !text
    find(".check code").textContent = text
    find(".share [role=status]").textContent = ""
  }

  function fill() {
    const options = (name, entries) => {
      const made = entries.map(([value, label]) => `<option value="${value}">${escaped(label)}</option>`)
      form.elements[name].innerHTML = made.join("")
    }
    const known = [...Object.keys(data.presets), ...Object.keys(data.runs)]
    options("preset", [...known.map((name) => [name, name]), ["", "my own"]])
    options("precision", Object.entries(data.precisions).map(([name, { label }]) => [name, label]))
    options("optimizer", Object.entries(data.optimizers).map(([name, { label }]) => [name, label]))
    form.elements.preset.value = "GPT-3 6.7B"
    form.elements.precision.value = "mixed"
    const radio = (n) => `<label><input type="radio" name="stage" value="${n}"> stage ${n}</label>`
    form.querySelector(".stages").innerHTML = data.stages.map(radio).join("")
    form.elements.stage.value = "2"
    usePreset()
  }

  // What lesson 5 does, shown in the fields that cannot be changed meanwhile; then what was there before.
  let before = null
  function fixToOffload(isFixed) {
    const names = ["precision", "optimizer", "stage"]
    const set = (from) => names.forEach((name) => (form.elements[name].value = from[name]))
    if (isFixed) {
      before = before || Object.fromEntries(names.map((name) => [name, form.elements[name].value]))
      set(data.offload)
    } else if (before) {
      set(before)
      before = null
    }
  }

  function usePreset() {
    const name = form.elements.preset.value, sizes = data.presets[name]
    if (sizes) SHAPE.forEach((each, place) => (form.elements[each].value = sizes[place]))
    if (sizes) form.elements.known.value = "shape"
    if (!data.runs[name]) return
    form.elements.offload.checked = false
    fixToOffload(false)
    for (const [each, value] of Object.entries(data.runs[name])) form.elements[each].value = value
  }

  function changed(event) {
    if (event.target.name === "preset") usePreset()
    else if ([...SHAPE, "known", "count"].includes(event.target.name)) form.elements.preset.value = ""
    update()
    history.replaceState(null, "", address())
  }

  fill()
  readAddress()
  form.addEventListener("input", changed)
  form.addEventListener("submit", (event) => event.preventDefault())
  find("[name=zoom]").addEventListener("input", update)
  find("[name=copy]").addEventListener("click", copy)
  window.addEventListener("hashchange", () => readAddress() && update())
  window.addEventListener("resize", update)
  update()
  return { read, columnsOf, code }
})()
