// Plays the recorded steps of animation_data.js (`zeroAnimation`), made by site/hooks/animation.py.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroAnimationPage`.

const zeroAnimationPage = (() => {
  "use strict"
  const { ranks: RANKS, numel: NUMEL, stages } = zeroAnimation
  const player = document.getElementById("animation")
  const find = (selector) => player.querySelector(selector)
  const count = (number) => number.toLocaleString("en")
  const still = window.matchMedia("(prefers-reduced-motion: reduce)")
  const KINDS = { parameters: 24, gradients: 24, optimizer: 48 } // and how high their boxes are
  const WIDTH = 430, LEFT = 104, GAP = 7, FLIGHT = 600
  const SCALE = (WIDTH - LEFT - GAP * (NUMEL.length - 1)) / NUMEL.reduce((a, b) => a + b)
  const LEGEND = [
    ["parameters o", "parameters"],
    ["parameters n", "parameters, new in this step"],
    ["gradients l", "gradient from one rank's own data"],
    ["gradients a", "averaged gradient"],
    ["optimizer x", "Adam's averages"],
    ["parameters e", "room for what comes"],
    ["parameters .", "not here"],
  ]
  const EVENTS = ["moment", "event", "what happens", "bytes sent by ranks 0 to 3", "live bytes, the most of a rank"]
  const TOTALS = ["bytes", "live between steps", "live at most", "sent in the step", "collectives made"]
  const now = { stage: 0, frame: 0, timer: null, flight: null }
  const recording = () => stages[now.stage]
  const frames = () => recording().frames

  // Boxes -----------------------------------------------------------------------------------------

  const lettered = { ".": "none", o: "old", n: "new", l: "local", a: "averaged", b: "both", e: "room", x: "state" }

  function box(kind, letter, x, y, width, height, owner) {
    const at = `x="${x.toFixed(1)}" width="${Math.max(1, width).toFixed(1)}"`
    const place = `x="${x + width / 2}" y="${y + height / 2 + 4.5}"`
    const label = owner >= 0 && width > 9 ? `<text ${place}>${owner}</text>` : ""
    return (
      `<g class="box ${kind} ${lettered[letter]}"><rect class="body" ${at} y="${y}" height="${height}" rx="2"/>` +
      `<rect class="half" ${at} y="${y + height / 2}" height="${height / 2}"/>` +
      `<rect class="bar" ${at} y="${y}" height="5"/>${label}</g>`
    )
  }

  function panel(rank) {
    const boxes = []
    let y = 2
    for (const [kind, height] of Object.entries(KINDS)) {
      boxes.push(`<text class="kind" x="${LEFT - 10}" y="${y + height / 2 + 4.5}">${kind}</text>`)
      let x = LEFT
      recording().segments.forEach((segments, layer) => {
        for (const [low, high, owner] of segments) {
          boxes.push(box(kind, ".", x + low * SCALE, y, (high - low) * SCALE - 1, height, owner))
        }
        x += NUMEL[layer] * SCALE + GAP
      })
      y += height + 8
    }
    let x = LEFT
    NUMEL.forEach((numel, layer) => {
      boxes.push(`<text class="layer" x="${x + (numel * SCALE) / 2}" y="${y + 9}">layer ${layer + 1}</text>`)
      x += numel * SCALE + GAP
    })
    const svg = `<svg viewBox="0 0 ${WIDTH} ${y + 14}" role="img">${boxes.join("")}</svg>`
    return `<figure class="rank"><figcaption><b>rank ${rank}</b> <span></span></figcaption>${svg}</figure>`
  }

  // A new stage has other cuts, so it gets new boxes; later only their classes change.
  function build() {
    find(".ranks").innerHTML = Array.from({ length: RANKS }, (_, rank) => panel(rank)).join("")
    find(".seek").max = frames().length - 1
    find(".events").innerHTML = `<thead>${heads(EVENTS)}</thead><tbody>${frames().map(row).join("")}</tbody>`
  }

  const heads = (names) => `<tr>${names.map((name) => `<th scope="col">${name}</th>`).join("")}</tr>`

  function row(frame, place) {
    const sent = frame.sent ? frame.sent.map(count).join(", ") : ""
    const jump = `<button type="button" data-frame="${place}">${place}</button>`
    const cells = [frame.title, frame.text, sent, count(Math.max(...frame.live))]
    return `<tr><th scope="row">${jump}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`
  }

  const lettersOf = (state, rank) => Object.keys(KINDS).flatMap((kind) => [...state[rank][kind].join("")])

  function paint(state, before) {
    find(".ranks").querySelectorAll(".rank").forEach((figure, rank) => {
      const letters = lettersOf(state, rank), old = before ? lettersOf(before, rank) : letters
      figure.querySelectorAll(".box").forEach((group, place) => {
        const kind = group.classList[1], letter = letters[place], last = old[place]
        const news = letter === last ? "" : letter === "." ? "freed" : "changed"
        group.setAttribute("class", `box ${kind} ${lettered[letter]} ${news}`)
      })
      figure.querySelector("svg").setAttribute("aria-label", described(state, rank))
    })
  }

  function described(state, rank) {
    const whole = Object.keys(KINDS).map((kind) => {
      const parts = state[rank][kind].map((letters, layer) => {
        const here = recording().segments[layer].filter((_, place) => !".e".includes(letters[place]))
        const numel = here.reduce((sum, [low, high]) => sum + high - low, 0)
        return numel ? `${Math.round((100 * numel) / NUMEL[layer])}% of layer ${layer + 1}` : ""
      })
      return `${kind}: ${parts.filter(Boolean).join(", ") || "none"}`
    })
    return `Rank ${rank} holds ${whole.join("; ")}.`
  }

  // What travels ----------------------------------------------------------------------------------

  // Places of a layer's boxes: in the list of a panel's boxes, of this kind.
  function placesOf(kind, layer) {
    const sizes = recording().segments.map((segments) => segments.length)
    const before = sizes.slice(0, layer).reduce((a, b) => a + b, 0)
    const all = sizes.reduce((a, b) => a + b, 0) * Object.keys(KINDS).indexOf(kind)
    return recording().segments[layer].map(([, , owner], place) => ({ owner, place: all + before + place }))
  }

  function journeys({ what, layers }) {
    const kind = what === "all_gather" ? "parameters" : "gradients", made = []
    const others = (rank) => [...Array(RANKS).keys()].filter((other) => other !== rank)
    for (const { owner, place } of layers.flatMap((layer) => placesOf(kind, layer))) {
      const ends = owner < 0 ? [...Array(RANKS).keys()] : [owner]
      for (const end of ends) {
        for (const other of others(end)) {
          const [from, to] = what === "all_gather" ? [end, other] : [other, end]
          made.push({ kind, place, from, to })
        }
      }
    }
    return made
  }

  function fly(frame) {
    const area = find(".ranks"), origin = area.getBoundingClientRect()
    const panels = [...area.querySelectorAll(".rank")].map((figure) => figure.querySelectorAll(".box .body"))
    const middle = (rank, place) => {
      const rect = panels[rank][place].getBoundingClientRect()
      return [rect.x + rect.width / 2 - origin.x, rect.y + rect.height / 2 - origin.y]
    }
    for (const { kind, place, from, to } of journeys(frame)) {
      const dot = document.createElement("i"), [x, y] = middle(from, place), [endX, endY] = middle(to, place)
      dot.className = `dot ${kind}`
      area.append(dot)
      const at = (left, top) => `translate(${left}px, ${top}px)`
      const moves = [{ transform: at(x, y) }, { transform: at(endX, endY) }]
      dot.animate(moves, { duration: FLIGHT, easing: "ease-in-out", fill: "both" }).onfinish = () => dot.remove()
    }
  }

  function land() {
    clearTimeout(now.flight)
    find(".ranks").querySelectorAll(".dot").forEach((dot) => dot.remove())
  }

  // Moments -----------------------------------------------------------------------------------------

  function show(place, moving = false) {
    land()
    now.frame = Math.max(0, Math.min(place, frames().length - 1))
    const frame = frames()[now.frame], before = now.frame ? frames()[now.frame - 1].state : null
    find(".caption strong").textContent = `${frame.title}.`
    find(".caption span").textContent = frame.text
    find(".seek").value = now.frame
    find(".seek").setAttribute("aria-valuetext", `${now.frame} of ${frames().length - 1}: ${frame.title}`)
    tell(frame)
    memory()
    if (moving && frame.sent && !still.matches) {
      paint(before, null)
      fly(frame)
      now.flight = setTimeout(() => paint(frame.state, before), FLIGHT)
    } else {
      paint(frame.state, before)
    }
  }

  function tell(frame) {
    const past = frames().slice(0, now.frame + 1).filter((each) => each.sent)
    find(".ranks").querySelectorAll("figcaption span").forEach((place, rank) => {
      const sent = past.reduce((sum, each) => sum + each.sent[rank], 0)
      place.textContent = `${count(frame.live[rank])} bytes live, ${count(sent)} sent`
    })
  }

  function play() {
    if (now.frame === frames().length - 1) show(0)
    const tick = () => {
      show(now.frame + 1, true)
      if (now.frame === frames().length - 1) pause()
      else now.timer = setTimeout(tick, Number(find(".speed select").value))
    }
    find(".play").textContent = "Pause"
    find(".caption").setAttribute("aria-live", "off") // a screen reader is not to talk all the time
    now.timer = setTimeout(tick, 150)
  }

  function pause() {
    clearTimeout(now.timer)
    now.timer = null
    find(".play").textContent = "Play"
    find(".caption").setAttribute("aria-live", "polite")
  }

  const deeds = {
    first: () => show(0),
    back: () => show(now.frame - 1),
    next: () => show(now.frame + 1, true),
    last: () => show(frames().length - 1),
  }

  function act(name) {
    const wasPlaying = now.timer !== null
    pause()
    if (name !== "play") deeds[name]()
    else if (!wasPlaying) play()
  }

  function choose(stage) {
    pause()
    land()
    now.stage = stage
    find(`.stages [value="${stage}"]`).checked = true
    build()
    show(0)
  }

  // Live bytes over the step --------------------------------------------------------------------

  function memory() {
    const width = Math.max(280, player.clientWidth - 24), height = 120, top = 22, floor = height - 20
    const most = Math.max(...stages.flatMap((stage) => stage.frames.flatMap((frame) => frame.live)))
    const lives = frames().map((frame) => Math.max(...frame.live)), step = width / lives.length
    const y = (bytes) => floor - (bytes / most) * (floor - top)
    const piece = (bytes, place) => `${place ? "L" : "M"}${place * step},${y(bytes)}H${(place + 1) * step}`
    const path = lives.map(piece).join(""), present = count(lives[now.frame])
    const said = `${count(lives[0])} at its start, ${count(Math.max(...lives))} at most, ${present} now`
    find(".memory").innerHTML = `
      <svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img"
        aria-label="Live bytes of a rank over the step: ${said}.">
      <path class="area" d="${path}V${floor}H0Z"/><path class="line" d="${path}"/>
      <line class="level" x1="0" x2="${width}" y1="${y(most)}" y2="${y(most)}"/>
      <text x="0" y="${y(most) - 6}">most at stage 0: ${count(most)} bytes live</text>
      <rect class="cursor" x="${now.frame * step}" y="${top - 4}" width="${step}" height="${floor - top + 4}"/>
      <text x="0" y="${height - 4}">live bytes over the step; now ${present}</text></svg>`
  }

  function totals() {
    const rows = stages.map((stage) => {
      const travels = stage.frames.filter((frame) => frame.sent)
      const all = travels.reduce((sum, frame) => sum + frame.sent.reduce((a, b) => a + b), 0)
      const start = Math.max(...stage.frames[0].live)
      const cells = [start, Math.max(...stage.peak), Math.round(all / RANKS), travels.length].map(count)
      return `<tr><th scope="row">stage ${stage.number}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`
    })
    const table = document.querySelector("#animation-totals table")
    table.innerHTML = `<thead>${heads(TOTALS)}</thead><tbody>${rows.join("")}</tbody>`
  }

  // The page --------------------------------------------------------------------------------------

  function fill() {
    const radio = ({ number }) => `<label><input type="radio" name="stage" value="${number}"> ${number}</label>`
    find(".stages").insertAdjacentHTML("beforeend", stages.map(radio).join(" "))
    const sample = (look) => {
      const [kind, letter] = look.split(" ")
      const drawn = box(kind, letter, 0, 0, 24, 14, -1)
      return `<svg width="26" height="16" viewBox="-1 -1 26 16" aria-hidden="true">${drawn}</svg>`
    }
    find(".legend").innerHTML = LEGEND.map(([look, text]) => `<li>${sample(look)}${text}</li>`).join("")
    totals()
  }

  const KEYS = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last", " ": "play" }

  function pressed(event) {
    const name = KEYS[event.key], own = event.target.closest("input, select, summary, .scroll")
    if (!name || own || event.altKey || event.ctrlKey || event.metaKey) return // they know these keys themselves
    if (event.key === " " && event.target.closest("button")) return
    event.preventDefault()
    act(name)
  }

  fill()
  player.addEventListener("keydown", pressed)
  player.addEventListener("click", (event) => {
    const button = event.target.closest("button")
    if (button && button.dataset.do) act(button.dataset.do)
    if (button && button.dataset.frame) {
      pause()
      show(Number(button.dataset.frame))
    }
  })
  find(".stages").addEventListener("input", (event) => choose(Number(event.target.value)))
  find(".seek").addEventListener("input", (event) => {
    pause()
    show(Number(event.target.value))
  })
  window.addEventListener("resize", memory)
  choose(0)
  return { now, frames, act, choose }
})()
