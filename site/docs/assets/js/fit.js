// The page "Fit my model": a form, an answer, and files to copy. What it computes is in fit_choice.js.
// All that was asked stands in the address behind #, so that it can be kept and sent.

const zeroFitPage = (() => {
  "use strict"
  const data = zeroFitData, human = zeroPlan.human
  const form = document.getElementById("fit"), result = document.getElementById("fit-result")
  const find = (selector) => result.querySelector(selector)
  const NUMBERS = ["world", "hosts", "memory", "hostMemory", "disk", "sequences", "context", "microBatches"]
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/"/g, "&quot;")

  // What the form says ----------------------------------------------------------------------------

  function asked() {
    const number = (name) => Number(form.elements[name].value)
    const isGiven = (name) => form.elements[name].value.trim() !== ""
    const bytes = (name) => (isGiven(name) ? Math.floor(number(name) * 1e9) : null)
    return {
      machine: {
        world: number("world"),
        hosts: number("hosts"),
        memory: bytes("memory"),
        hostMemory: bytes("hostMemory"),
        disk: bytes("disk"),
      },
      run: {
        sequences: number("sequences"),
        context: number("context"),
        microBatches: number("microBatches"),
        precision: form.elements.precision.value,
        checkpoints: form.elements.checkpoints.checked,
      },
    }
  }

  function problem() {
    const wrong = [...form.elements].find((field) => field.willValidate && !field.checkValidity())
    if (wrong) {
      const name = wrong.closest("label").textContent.trim()
      return `${name}: give a number from ${wrong.min} to ${Number(wrong.max).toLocaleString("en")}.`
    }
    const { world, hosts } = asked().machine
    return world % hosts ? `GPUs: ${world} cannot be divided equally among ${hosts} hosts.` : ""
  }

  function configGiven() {
    try {
      return JSON.parse(form.elements.config.value)
    } catch (error) {
      throw Error(`config.json is not JSON: ${error.message}`)
    }
  }

  // The address -----------------------------------------------------------------------------------

  // Of config.json the keys that its family reads, and those that are given only.
  function essential(config, { family }) {
    const read = [...family.sizes, ...family.requirements].map(({ key }) => key)
    const keys = ["architectures", "model_type", ...read]
    return Object.fromEntries([...new Set(keys)].filter((key) => key in config).map((key) => [key, config[key]]))
  }

  function address(config) {
    const fields = [...NUMBERS, "precision"].map((name) => [name, form.elements[name].value])
    const checked = form.elements.checkpoints.checked ? [["checkpoints", "1"]] : []
    const given = fields.filter(([, value]) => value !== "")
    return `#${new URLSearchParams([...given, ...checked, ["config", JSON.stringify(config)]])}`
  }

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1))
    if (!given.has("config")) return false
    for (const name of NUMBERS) form.elements[name].value = given.get(name) ?? ""
    if (given.get("precision") in data.precisions) form.elements.precision.value = given.get("precision")
    form.elements.checkpoints.checked = given.get("checkpoints") === "1"
    form.elements.config.value = given.get("config")
    try {
      form.elements.config.value = JSON.stringify(JSON.parse(given.get("config")), null, 1)
    } catch {
      // shown as it is, and refused
    }
    form.elements.preset.value = ""
    return true
  }

  // The answer ------------------------------------------------------------------------------------

  function show(shape, found, { machine, run }) {
    const { chosen, numel } = found, count = `${numel.toLocaleString("en")} parameters`
    const how = chosen && chosen.verdict === "tight" ? " It is tight." : ""
    const answer = chosen ? `${chosen.name} fits: ${chosen.reason}.${how}` : `nothing fits. ${next(machine, run)}`
    say(`${shape.family.model}, ${count}: ${answer}`, !chosen)
    find(".tried").innerHTML = found.tried.map((each) => {
      const peak = human(each.plan.peak) + (each.plan.activations === null ? " + activations" : "")
      const mark = each === chosen ? ' aria-current="true"' : ""
      return `<li class="${each.verdict}"${mark}><b>${each.name}: ${each.verdict}</b>peak ${peak}; ${each.reason}</li>`
    }).join("")
    find(".notes").innerHTML = shape.notes.map((note) => `<li>${escaped(note)}</li>`).join("")
    find(".finished").hidden = !chosen
    if (!chosen) return
    const code = (name, text) => (find(`[data-name=${name}]`).textContent = text)
    code("config", JSON.stringify(chosen.config, null, 2))
    code("script", zeroFit.snippet(shape, run))
    code("start", zeroFit.torchrun(machine))
  }

  function next(machine, run) {
    const ways = [
      ...(run.checkpoints ? [] : ["activation checkpointing"]),
      ...(machine.hostMemory === null ? ["a host's memory"] : []),
      ...(machine.disk === null ? ["a disk"] : []),
      ...(run.sequences > 1 ? ["fewer sequences"] : []),
    ]
    return `Try ${[...ways, "more GPUs"].join(", or ")}.`
  }

  function say(text, isWrong) {
    find(".answer").textContent = text
    find(".answer").classList.toggle("wrong", isWrong)
  }

  // Nothing of an older answer stays beside a mistake.
  function refuse(text) {
    say(text, true)
    for (const list of [".tried", ".notes"]) find(list).innerHTML = ""
    find(".finished").hidden = true
    find(".share").hidden = true
  }

  function update() {
    find(".share [role=status]").textContent = ""
    const wrong = problem()
    if (wrong) return refuse(wrong)
    try {
      const config = configGiven(), shape = zeroFitShape.shapeOf(config), wanted = asked()
      show(shape, zeroFit.fit(shape, wanted.machine, wanted.run), wanted)
      find(".share").hidden = false
      history.replaceState(null, "", address(essential(config, shape)))
    } catch (error) {
      refuse(error.message)
    }
  }

  // The page --------------------------------------------------------------------------------------

  function copy() {
    const told = find(".share [role=status]")
    const done = () => (told.textContent = "Copied.")
    const failed = () => (told.textContent = "The browser does not allow it: copy the address of this page.")
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(done, failed)
    else failed()
  }

  function usePreset() {
    const config = data.presets[form.elements.preset.value]
    if (config) form.elements.config.value = JSON.stringify(config, null, 1)
  }

  function fill() {
    const options = (name, entries) => {
      const made = entries.map(([value, label]) => `<option value="${value}">${escaped(label)}</option>`)
      form.elements[name].innerHTML = made.join("")
    }
    options("preset", [...Object.keys(data.presets).map((name) => [name, name]), ["", "my own"]])
    options("precision", Object.entries(data.precisions).map(([name, { label }]) => [name, label]))
    form.elements.precision.value = "mixed"
    form.elements.preset.value = "Llama 3 8B"
    usePreset()
  }

  fill()
  readAddress()
  form.addEventListener("input", ({ target }) => {
    if (target.name === "preset") usePreset()
    if (target.name === "config") form.elements.preset.value = ""
    update()
  })
  form.addEventListener("submit", (event) => event.preventDefault())
  find("[name=copy]").addEventListener("click", copy)
  window.addEventListener("hashchange", () => readAddress() && update())
  update()
  return { asked }
})()
