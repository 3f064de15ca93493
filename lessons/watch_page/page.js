// Steps through a run that lessons/watch.py has recorded. Everything is in `zeroWatch`.

const zeroWatch = (() => {
  "use strict"
  const run = JSON.parse(document.getElementById("run").textContent)
  const find = (selector) => document.querySelector(selector)
  const count = (number) => number.toLocaleString("en")
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;")
  const RANKS = run.ranks.length, LAST = run.moments.length - 1
  const NAMES = { parameters: "parameters", gradients: "gradients", optimizer: "optimizer's state", other: "live beside that: activations, copies" }
  const most = Math.max(1, ...run.memories.map((memory) => Math.max(memory[3], memory[0] + memory[1] + memory[2])))
  const broken = run.end.length > 0
  let now = 0

  const moment = () => run.moments[now]
  const lineOf = (rank) => run.ranks[rank].lines[moment()[0][rank]]

  // Columns ---------------------------------------------------------------------------------------

  function codeOf(file) {
    const shown = run.files[file].text.split("\n").map((text, place) => [text, place + 1])
    const wanted = shown.filter(([text]) => !/^\s*# --8<-- /.test(text))
    const inset = (text) => Math.min(text.search(/\S|$/) + 4, 16)  // of what a long line continues with
    const row = ([text, number]) => `<div data-line="${number}" style="--inset: ${inset(text)}ch">${escaped(text) || " "}</div>`
    return wanted.map(row).join("")
  }

  function build() {
    find(".ranks").innerHTML = run.ranks.map((_, rank) => `<section class="rank" aria-label="rank ${rank}">
      <h2>rank ${rank} <span></span></h2><div class="strip" role="img"></div><p class="bytes"></p></section>`).join("")
    find(".places").innerHTML = run.ranks.map(() => `<section class="place" hidden><h2></h2>
      <div class="code" tabindex="0" role="region"></div></section>`).join("")
    find(".seek").max = LAST
    find(".legend").innerHTML = Object.entries(NAMES).map(([kind, name]) => `<li><i class="${kind}"></i>${name}</li>`).join("")
    if (!broken) return
    find(".end").hidden = false
    find(".end pre").textContent = [...run.end, "", run.error].join("\n")
  }

  function column(rank) {
    const panel = document.querySelectorAll(".rank")[rank], line = lineOf(rank)
    const waits = moment()[1][rank] === 1
    panel.classList.toggle("waits", waits)
    const state = now === LAST && broken && run.ranks[rank].end ? "has ended" : waits ? "waits" : ""
    panel.querySelector("h2 span").textContent = [line ? `line ${line[1]}` : "", state].filter(Boolean).join(", ")
    panel.dataset.line = line ? line[1] : ""
    if (line) strip(panel, run.memories[line[3]])
  }

  // Ranks at the same line share a window, so that it is wide enough for a whole line.
  function places() {
    const groups = new Map()
    run.ranks.forEach((_, rank) => {
      const line = lineOf(rank)
      if (!line) return
      const key = `${line[0]}:${line[1]}`
      groups.set(key, [...(groups.get(key) || []), rank])
    })
    const panels = [...document.querySelectorAll(".place")], shown = [...groups.values()]
    find(".places").dataset.count = shown.length
    panels.forEach((panel, place) => {
      panel.hidden = place >= shown.length
      if (!panel.hidden) look(panel, shown[place])
    })
  }

  function look(panel, ranks) {
    const [file, number] = lineOf(ranks[0]), code = panel.querySelector(".code")
    const names = ranks.length > 1 ? `ranks ${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}` : `rank ${ranks[0]}`
    panel.querySelector("h2").textContent = `${names}: ${run.files[file].name}, line ${number}`
    code.setAttribute("aria-label", `code of ${names}`)
    if (code.dataset.file !== String(file)) {
      code.dataset.file = file
      code.innerHTML = codeOf(file)
    }
    const old = code.querySelector(".now"), next = code.querySelector(`[data-line="${number}"]`)
    if (old) old.removeAttribute("aria-current")
    if (old) old.classList.remove("now")
    if (!next) return
    next.classList.add("now")
    next.setAttribute("aria-current", "true")
    const low = next.offsetTop - code.clientHeight * 0.75, high = next.offsetTop - code.clientHeight * 0.25
    if (code.scrollTop < low || code.scrollTop > high) code.scrollTop = next.offsetTop - code.clientHeight / 2
  }

  function strip(panel, memory) {
    const [parameters, gradients, optimizer, live] = memory
    const parts = { parameters, gradients, optimizer, other: Math.max(0, live - parameters - gradients - optimizer) }
    const bars = Object.entries(parts).map(([kind, bytes]) => `<i class="${kind}" style="width: ${(100 * bytes) / most}%"></i>`)
    const said = Object.entries(parts).filter(([, bytes]) => bytes).map(([kind, bytes]) => `${kind} ${count(bytes)}`)
    panel.querySelector(".strip").innerHTML = bars.join("")
    panel.querySelector(".strip").setAttribute("aria-label", `bytes: ${said.join(", ")}`)
    panel.querySelector(".bytes").textContent = `${said.join(", ") || "nothing"} bytes`
  }

  // The wire --------------------------------------------------------------------------------------

  const X = (rank) => 40 + rank * (320 / (RANKS - 1))

  // From one rank to another: to the right above the ranks, to the left below them.
  function arrow(from, to, kind, label) {
    const up = to > from ? -1 : 1, far = Math.abs(to - from), bend = 76 + up * (22 + 22 * far)
    const y = 76 + up * 19, middle = (X(from) + X(to)) / 2, shift = to > from ? 7 : -7
    const tip = `${X(to) - shift},${y} ${X(to) - shift - 5},${y + up * 9} ${X(to) - shift + 5},${y + up * 9}`
    const text = label ? `<text x="${middle}" y="${(y + bend) / 2 + (up < 0 ? 2 : 8)}">${label}</text>` : ""
    const line = `<path class="${kind}" d="M${X(from) + shift},${y}Q${middle},${bend} ${X(to) - shift},${y}"/>`
    return [`${line}<polygon class="tip ${kind}-tip" points="${tip}"/>`, text]
  }

  function travels(number) {
    const arrows = []
    run.ranks.forEach(({ meetings }, from) => {
      meetings[number][2].forEach((bytes, to) => {
        if (bytes) arrows.push(arrow(from, to, "travel", Math.abs(to - from) === 1 ? count(bytes) : ""))
      })
    })
    return arrows
  }

  function messages() {
    return moment()[3].map(([from, to, bytes]) => arrow(from, to, "travel", Math.abs(to - from) === 1 ? count(bytes) : ""))
  }

  function waitsFor() {
    if (now !== LAST || !broken) return []
    return run.waitsFor.flatMap((others, from) => others.map((to) => arrow(from, to, "wait", "")))
  }

  function wire() {
    const meeting = moment()[2], arrows = meeting >= 0 ? travels(meeting) : [...messages(), ...waitsFor()]
    const dots = [...Array(RANKS).keys()].map((rank) => {
      const look = moment()[1][rank] ? ' class="waiting"' : ""
      return `<circle${look} cx="${X(rank)}" cy="76" r="18"/><text x="${X(rank)}" y="81">${rank}</text>`
    })
    find(".wire").innerHTML = `<svg viewBox="0 0 400 152" role="img" aria-label="${escaped(said())}">
      ${arrows.map(([line]) => line).join("")}${dots.join("")}${arrows.map(([, text]) => text).join("")}</svg>`
  }

  function said() {
    const [, waits, meeting] = moment()
    if (meeting >= 0) {
      const calls = run.ranks.map(({ meetings }) => meetings[meeting])
      const sent = calls.map(([, , to]) => to.reduce((a, b) => a + b, 0))
      return `All meet in ${calls[0][0]}, called at ${calls[0][1]}. Bytes sent by ranks 0 to ${RANKS - 1}: ${sent.map(count).join(", ")}.`
    }
    const told = moment()[3].map(([from, to, bytes]) => `rank ${to} gets ${count(bytes)} bytes from rank ${from}`)
    const waiting = waits.flatMap((wait, rank) => (wait ? [`rank ${rank}`] : []))
    if (now === LAST && broken) return `It stops here. ${run.end.join(". ")}.`
    if (told.length) return `${told.join(", ")}.`
    return waiting.length ? `${waiting.join(", ")}: there already, waiting.` : "All ranks run."
  }

  function show(place) {
    now = Math.max(0, Math.min(place, LAST))
    const line = run.ranks.map((_, rank) => lineOf(rank)).find(Boolean)
    const cut = run.cut && now === LAST ? " Later lines were too many to be shown." : ""
    const phase = line ? `, ${run.phases[line[2]]}` : ""
    find(".caption").textContent = `${now} of ${LAST}${phase}. ${said()}${cut}`
    find(".seek").value = now
    find(".seek").setAttribute("aria-valuetext", `moment ${now} of ${LAST}`)
    run.ranks.forEach((_, rank) => column(rank))
    places()
    wire()
    for (const name of ["first", "before", "back"]) find(`[data-do=${name}]`).disabled = now === 0
    for (const name of ["next", "after", "last"]) find(`[data-do=${name}]`).disabled = now === LAST
  }

  // Moving ----------------------------------------------------------------------------------------

  const isCall = ([, , meeting, messages]) => meeting >= 0 || messages.length > 0
  const deeds = {
    first: () => show(now > run.start ? run.start : 0),
    before: () => show(run.moments.slice(0, now).findLastIndex(isCall)),
    back: () => show(now - 1),
    next: () => show(now + 1),
    after: () => {
      const far = run.moments.slice(now + 1).findIndex(isCall)
      show(far < 0 ? LAST : now + 1 + far)
    },
    last: () => show(LAST),
  }
  const KEYS = { ArrowLeft: "back", ArrowRight: "next", ArrowUp: "before", ArrowDown: "after", Home: "first", End: "last" }

  document.addEventListener("keydown", (event) => {
    const name = KEYS[event.key]
    if (!name || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, .code")) return
    event.preventDefault()
    deeds[name]()
  })
  find(".controls").addEventListener("click", (event) => {
    const button = event.target.closest("button")
    if (button) deeds[button.dataset.do]()
  })
  find(".seek").addEventListener("input", (event) => show(Number(event.target.value)))

  build()
  show(run.start)
  return { show, at: () => now, said, last: LAST }
})()
