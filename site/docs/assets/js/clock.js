// The clock's page: a form, a chart, a table. What it computes is in clock_replay.js.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroClockPage`.

const zeroClockPage = (() => {
  "use strict"
  const form = document.getElementById("clock"), result = document.getElementById("clock-result")
  const find = (selector) => result.querySelector(selector)
  const STAGES = ["0", "1", "2", "3", "3 with prefetch"]
  const letters = Object.fromEntries(Object.entries(zeroClock.names).map(([letter, what]) => [what, letter]))
  const count = (number) => Math.round(number).toLocaleString("en")
  const three = (number) => (number >= 1000 ? count(Number(number.toPrecision(3))) : String(Number(number.toPrecision(3))))

  function duration(time) {
    const units = [["s", 1], ["ms", 1e3], ["µs", 1e6]]
    const [unit, times] = units.find(([, times]) => time * times >= 1) || ["ns", 1e9]
    return time ? `${three(time * times)} ${unit}` : "0 s"
  }

  function large(number) {
    const units = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]
    const [unit, size] = units.find(([, size]) => number >= 0.9995 * size) || ["", 1]
    return `${three(number / size)} ${unit}`.trim()
  }

  // What the form says --------------------------------------------------------------------------

  const SLIDERS = {
    ranks: (value) => zeroClock.ranks[value],
    bucket: (value) => zeroClock.buckets[value],
    microBatches: (value) => value,
    tokens: (value) => Math.round(2 ** value),
    parameters: (value) => Number((10 ** value).toPrecision(2)),
  }
  const OWN = { latency: 1e-6, bandwidth: 1e9, flops: 1e12 } // the fields' units: µs, GB/s, TFLOP/s

  function read() {
    const state = { stage: form.elements.stage.value, machine: {} }
    for (const [name, of] of Object.entries(SLIDERS)) state[name] = of(Number(form.elements[name].value))
    for (const [name, unit] of Object.entries(OWN)) state.machine[name] = Number(form.elements[name].value) * unit
    return state
  }

  function problem() {
    const wrong = Object.keys(OWN).map((name) => form.elements[name]).find((field) => !field.checkValidity())
    return wrong ? `${wrong.closest("label").textContent.trim()}: give a number above 0.` : ""
  }

  function takeMachine() {
    const chosen = zeroClock.machines[form.elements.machine.value]
    if (!chosen) return
    for (const [name, unit] of Object.entries(OWN)) {
      form.elements[name].value = Number((chosen[name] / unit).toPrecision(6))
    }
  }

  function labels(state) {
    const said = {
      ranks: state.ranks,
      bucket: `${large((state.bucket / zeroClock.numel) * state.parameters)} elements`,
      microBatches: state.microBatches,
      tokens: count(state.tokens),
      parameters: large(state.parameters),
    }
    for (const [name, text] of Object.entries(said)) {
      form.elements[name].closest("label").querySelector("output").textContent = text
      form.elements[name].setAttribute("aria-valuetext", text)
    }
    form.elements.bucket.disabled = state.stage !== "2"
  }

  // The chart -----------------------------------------------------------------------------------

  function lane(bars, y, scale) {
    return bars.map(({ what, start, end }) => {
      const x = start * scale, wide = Math.max(0.3, (end - start) * scale)
      const letter = wide > 14 ? `<text x="${x + wide / 2}" y="${y + 19}" text-anchor="middle">${letters[what]}</text>` : ""
      return `<rect class="${what}" x="${x.toFixed(2)}" y="${y}" width="${wide.toFixed(2)}" height="28"/>${letter}`
    }).join("")
  }

  function chart(run, state) {
    const width = Math.max(280, result.clientWidth), scale = (width - 2) / run.step
    const said = `A step of stage ${state.stage}: ${duration(run.step)}. Arithmetic ${duration(run.step - run.idle)}, ` +
      `network ${duration(run.sending)}, both at once ${duration(run.hidden)}.`
    return `<svg viewBox="0 0 ${width} 122" width="${width}" height="122" role="img" aria-label="${said}">
      <text x="0" y="13">arithmetic of a rank</text><rect class="ground" x="0" y="20" width="${width}" height="28"/>
      ${lane(run.arithmetic, 20, scale)}
      <text x="0" y="67">its network</text><rect class="ground" x="0" y="74" width="${width}" height="28"/>
      ${lane(run.network, 74, scale)}
      <text x="0" y="119">0</text><text x="${width}" y="119" text-anchor="end">${duration(run.step)}</text></svg>`
  }

  function compared(runs) {
    const width = Math.max(280, result.clientWidth), left = 118, longest = Math.max(...runs.map((each) => each.run.step))
    const scale = (width - left - 66) / longest
    const rows = runs.map(({ stage, run }, place) => {
      const y = 4 + 24 * place, arithmetic = (run.step - run.idle) * scale, idle = run.idle * scale
      return `<text x="0" y="${y + 14}">stage ${stage.replace("with ", "")}</text>
        <rect class="backward" x="${left}" y="${y}" width="${arithmetic.toFixed(1)}" height="18"/>
        <rect class="idle" x="${(left + arithmetic).toFixed(1)}" y="${y}" width="${idle.toFixed(1)}" height="18"/>
        <text x="${(left + arithmetic + idle + 5).toFixed(1)}" y="${y + 14}">${duration(run.step)}</text>`
    })
    const said = runs.map(({ stage, run }) => `stage ${stage} ${duration(run.step)}, idle ${duration(run.idle)}`)
    return `<svg viewBox="0 0 ${width} 126" width="${width}" height="126" role="img"
      aria-label="Time of a step: ${said.join("; ")}.">${rows.join("")}</svg>`
  }

  // The words -----------------------------------------------------------------------------------

  function hiding({ early, found }, run) {
    if (early === null) return "Nothing is sent before the arithmetic is over, so no batch hides the network behind it."
    if (found === null) return "The arithmetic waits at once for what is sent early, so no batch hides it."
    return `Larger batches hide more communication, at most ${duration(run.hidden)} of its ${duration(run.sending)}. The replay ` +
      `gets there at ${count(found)} tokens per rank; the formula, which ignores latency, predicts ${count(early)}.`
  }

  const HEADS = ["", "step", "arithmetic", "network busy", "hidden", "stands still", "hides from, replay", "formula"]

  function table(runs, chosen) {
    const tokens = (number) => (number === null ? "no batch" : count(number))
    const rows = runs.map(({ stage, run, early, found }) => {
      const times = [run.step, run.step - run.idle, run.sending, run.hidden, run.idle].map(duration)
      const cells = [...times, tokens(early === null ? null : found), tokens(found === null ? null : early)]
      const look = stage === chosen ? ' class="chosen"' : ""
      return `<tr${look}><th scope="row">stage ${stage}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`
    })
    const heads = HEADS.map((head) => (head ? `<th scope="col">${head}</th>` : "<td></td>")).join("")
    return `<thead><tr>${heads}</tr></thead><tbody>${rows.join("")}</tbody>`
  }

  function legend(run) {
    const used = [...new Set([...run.arithmetic, ...run.network].map((bar) => bar.what))]
    const sample = (what) => `<svg width="16" height="14" aria-hidden="true"><rect class="${what}" width="16" height="14"/></svg>`
    return [...used.map((what) => `<li>${sample(what)}${letters[what]} ${what}</li>`), `<li>${sample("idle")}stands still (below)</li>`].join("")
  }

  function show() {
    const state = read(), wrong = problem()
    labels(state)
    find(".answer").classList.toggle("wrong", wrong !== "")
    if (wrong) {
      find(".answer").textContent = wrong
      return
    }
    const size = { parameters: state.parameters, tokens: state.tokens }
    const runs = STAGES.map((stage) => {
      const setting = { ...state, stage }
      const found = zeroReplay.hidesFrom(setting, state.machine, state.parameters)
      return { stage, run: zeroReplay.replay(setting, state.machine, size), early: zeroReplay.bound(setting, state.machine), found }
    })
    const mine = runs.find(({ stage }) => stage === state.stage)
    const best = mine.found ? zeroReplay.replay(state, state.machine, { ...size, tokens: mine.found }) : mine.run
    find(".answer").innerHTML = `<strong>Stage ${state.stage}: a step takes ${duration(mine.run.step)}; the arithmetic ` +
      `stands still ${duration(mine.run.idle)} of it.</strong> ${hiding(mine, best)}`
    find(".chart").innerHTML = chart(mine.run, state)
    find(".legend").innerHTML = legend(mine.run)
    find(".compared").innerHTML = compared(runs)
    find(".numbers").innerHTML = table(runs, state.stage)
    const chosen = zeroClock.machines[form.elements.machine.value]
    find(".source").textContent = chosen ? `${chosen.name}. ${chosen.source}.` : "Your own numbers."
  }

  // The page ------------------------------------------------------------------------------------

  function fill() {
    const radio = (stage) => `<label><input type="radio" name="stage" value="${stage}"> ${stage}</label>`
    form.querySelector(".stages").innerHTML = STAGES.map(radio).join(" ")
    form.elements.stage.value = "2"
    const options = Object.entries(zeroClock.machines).map(([key, { name }]) => `<option value="${key}">${name}</option>`)
    form.elements.machine.innerHTML = `${options.join("")}<option value="">your own</option>`
    form.elements.machine.value = "pcie"
    form.elements.ranks.max = zeroClock.ranks.length - 1
    form.elements.ranks.value = zeroClock.ranks.indexOf(4)
    form.elements.bucket.max = zeroClock.buckets.length - 1
    takeMachine()
  }

  fill()
  form.addEventListener("input", (event) => {
    if (event.target.name === "machine") takeMachine()
    if (event.target.name in OWN) form.elements.machine.value = ""
    show()
  })
  form.addEventListener("submit", (event) => event.preventDefault())
  window.addEventListener("resize", show)
  show()
  return { read }
})()
