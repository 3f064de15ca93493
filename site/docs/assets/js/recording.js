// Draws a recording of a real run, a file that `engine.record` of zero_full has made. It is read in the browser
// and sent nowhere. A classic script, as Chromium loads no modules from file://. All is in `zeroRecordingPage`.

const zeroRecordingPage = (() => {
  "use strict"
  const FORMAT = "zero_full recording", VERSION = 1
  const MOST_RANKS = 16, LONG_LIST = 400
  const PASSES = { forward: "forward", backward: "backward", step: "update" }
  const CARRIES = { reduce_scatter: "gradients", all_reduce: "gradients", all_gather: "parameters" }
  const TIMES = 32, BESIDE = 12, MEMORY = 34, GAP = 16, LABEL = 15, AXIS = 20
  const area = document.getElementById("recording"), drop = document.getElementById("recording-drop")
  const find = (selector) => area.querySelector(selector)
  const now = { recording: null, step: null, frames: [], place: 0 }

  // Words -----------------------------------------------------------------------------------------

  const safe = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`) // names are anybody's

  function ms(us) {
    const value = us / 1000
    return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`
  }

  function human(size) {
    for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (size >= scale * 0.9995) {
        const number = size / scale
        return `${number.toFixed(Math.max(0, 3 - String(Math.round(number)).length))} ${unit}`
      }
    }
    return `${size} B`
  }

  const listed = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`

  // Reading ---------------------------------------------------------------------------------------

  function parsed(text, name) {
    let found = null
    try {
      found = JSON.parse(text)
    } catch (error) {
      if (text.startsWith(`{"${FORMAT}"`)) throw new Error(`${name} is one rank's part: python -m zero_full replay puts all parts together.`)
      throw new Error(`${name} is not a recording. engine.record(path) of zero_full makes one.`)
    }
    if (!found || typeof found !== "object" || !(FORMAT in found)) throw new Error(`${name} is not a recording. engine.record(path) of zero_full makes one.`)
    if (typeof found[FORMAT] === "object") throw new Error(`${name} is one rank's part: python -m zero_full replay puts all parts together.`)
    if (found[FORMAT] !== VERSION) throw new Error(`${name} has format version ${found[FORMAT]}, not ${VERSION}, which this page reads.`)
    if (!Array.isArray(found.frames) || !found.frames.length) throw new Error(`${name} has no moments: nothing was recorded.`)
    return found
  }

  function load(text, name) {
    let found = null
    try {
      found = parsed(text, name)
      open(found)
      say("")
    } catch (error) {
      area.hidden = true
      now.recording = null
      say(found ? `${name} cannot be drawn: something is missing in it.` : error.message)
    }
  }

  async function take(files) {
    if (files.length > 1) return say("One file at a time: the one that engine.record has made of all ranks.")
    if (files.length) load(await files[0].text(), files[0].name)
  }

  const say = (text) => { drop.querySelector("[role=status]").textContent = text }

  // One step --------------------------------------------------------------------------------------

  function open(recording) {
    now.recording = recording
    const steps = [...new Set(recording.frames.map((frame) => frame.step))].sort((a, b) => a - b)
    const option = (step) => `<option value="${step}">step ${step}</option>`
    find(".steps select").innerHTML = `${steps.map(option).join("")}<option value="">all steps</option>`
    area.hidden = false
    find(".about").textContent = about(recording)
    find(".told").innerHTML = table(["", "waited", "for whom", "peak memory", "recording"], ranksTable(recording))
    const sore = recording.frames.find((frame) => frame.failed || frame.missing.length)
    choose(sore ? sore.step : steps[steps.length - 1])
    if (sore) show(now.frames.indexOf(sore))
    area.scrollIntoView({ block: "start" })
  }

  function about(recording) {
    const { ranks, present, dropped, unaligned, device } = recording
    const absent = Array.from({ length: ranks }, (_, rank) => rank).filter((rank) => !present.includes(rank))
    return [
      `Stage ${recording.stage} on ${ranks} rank${ranks > 1 ? "s" : ""} (${device}).`,
      absent.length ? `There are no events of ${listed(absent)}.` : "",
      dropped.events ? `Earlier events are dropped: ${dropped.events} events of ${dropped.steps} step${dropped.steps === 1 ? "" : "s"}.` : "",
      unaligned.length ? `The clock of ${listed(unaligned)} could not be aligned with the others.` : "",
      device === "cpu" ? "" : "Times are when the host has queued the work, not when the device did it.",
      present.length > MOST_RANKS ? `Drawn are the ${MOST_RANKS} ranks that have waited longest, or were waited for.` : "",
    ].filter(Boolean).join(" ")
  }

  function choose(step) {
    now.step = step === "" ? null : Number(step)
    find(".steps select").value = step
    now.frames = now.recording.frames.filter((frame) => now.step === null || frame.step === now.step)
    find(".seek").max = now.frames.length - 1
    const rows = now.frames.slice(0, LONG_LIST).map((frame, place) => [
      `<button type="button" data-place="${place}">${ms(begin(frame))}</button>`, safe(frame.title), safe(frame.text),
      frame.sent ? human(Math.max(...frame.sent)) : "", human(Math.max(...frame.live)),
    ])
    find(".events").innerHTML = table(["from", "what", "what happened", "bytes sent, the most of a rank", "bytes held, the most of a rank"], rows)
    if (now.frames.length > LONG_LIST) find(".events").insertAdjacentHTML("beforeend", `<tr><td colspan="5">${now.frames.length - LONG_LIST} more: choose one step</td></tr>`)
    show(0)
  }

  function show(place) {
    now.place = Math.max(0, Math.min(place, now.frames.length - 1))
    const frame = now.frames[now.place]
    find(".caption strong").textContent = `${frame.title}.`
    find(".caption span").textContent = frame.text
    find(".seek").value = now.place
    find(".seek").setAttribute("aria-valuetext", `${now.place} of ${now.frames.length - 1}: ${frame.title}`)
    draw()
    find(".held").innerHTML = table(["bytes held now", ...now.recording.kinds], drawn().map((rank) => [
      `rank ${rank}`, ...frame.held[rank].map(human),
    ]))
  }

  const begin = (frame) => Math.min(...frame.start.filter((time) => time !== null))

  // The picture -----------------------------------------------------------------------------------

  function drawn() {
    const { present, waits } = now.recording
    if (present.length <= MOST_RANKS) return present
    const score = new Map(present.map((rank) => [rank, 0]))
    const add = (rank, us) => score.has(rank) && score.set(rank, score.get(rank) + us)
    waits.forEach((mine, rank) => mine.forEach(([whom, us]) => { add(rank, us); add(whom, us) }))
    return [...present].sort((a, b) => score.get(b) - score.get(a)).slice(0, MOST_RANKS).sort((a, b) => a - b)
  }

  function span() {
    const times = now.frames.flatMap((frame) => [...frame.start, ...frame.end]).filter((time) => time !== null)
    const first = Math.min(...times), last = Math.max(...times)
    return { first, last: Math.max(last, first + 1) }
  }

  function draw() {
    const width = Math.max(280, area.clientWidth - 24), { first, last } = span()
    const x = (time) => ((time - first) / (last - first)) * width
    const beside = now.frames.some((frame) => frame.beside), lane = LABEL + TIMES + (beside ? BESIDE + 2 : 0) + MEMORY + GAP
    const ranks = drawn(), height = ranks.length * lane + AXIS
    const most = Math.max(1, ...now.frames.flatMap((frame) => ranks.map((rank) => frame.live[rank])))
    const lanes = ranks.map((rank, row) => oneRank(rank, row * lane, { x, last, most, width, beside }))
    const frame = now.frames[now.place], from = x(begin(frame))
    const to = x(Math.max(...frame.end.map((time, rank) => time ?? (frame.start[rank] === null ? first : last))))
    find(".times").innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="${safe(described(ranks, first, last))}">
      <defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="under" width="6" height="6"/><rect class="stripe" width="2.5" height="6"/></pattern></defs>
      <rect class="cursor" x="${from.toFixed(1)}" y="0" width="${Math.max(2, to - from).toFixed(1)}" height="${height - AXIS}"/>
      ${axis(first, last, x, width, height)}${lanes.join("")}</svg>`
  }

  function oneRank(rank, top, { x, last, most, width, beside }) {
    const marks = [], y = top + LABEL
    now.frames.forEach((frame, place) => {
      if (frame.start[rank] === null || frame.what === "between") return
      const pass = PASSES[frame.what], from = x(frame.start[rank]), to = x(frame.end[rank] ?? last)
      const inside = { top: frame.beside ? y + TIMES + 2 : pass ? y : y + 3, height: frame.beside ? BESIDE : pass ? TIMES : TIMES - 16 }
      if (pass) {
        marks.push(bar(`pass ${pass}`, from, to, inside, place))
        if (to - from > 60) marks.push(`<text class="in" x="${(from + 3).toFixed(1)}" y="${y + TIMES - 3}">${pass}</text>`)
        return
      }
      const arrived = Math.min(to, x(frame.start[rank] + frame.waited[rank]))
      marks.push(bar(`call ${CARRIES[frame.what] || "other"}`, arrived, to, inside, place))
      if (arrived > from) marks.push(bar("waits", from, arrived, inside, place))
      if (frame.failed) marks.push(`<text class="failed" x="${Math.min(width - 10, to).toFixed(1)}" y="${inside.top + 13}">&#10007;</text>`)
    })
    const passes = marks.filter((mark) => mark.includes("pass ")), others = marks.filter((mark) => !mark.includes("pass "))
    const frame = now.frames[now.place], floor = y + TIMES + (beside ? BESIDE + 2 : 0) + MEMORY + 2
    return `<g><text class="label" x="0" y="${top + 11}">rank ${rank}<tspan class="soft"> ${human(frame.live[rank])} held</tspan></text>
      ${passes.join("")}${others.join("")}${memory(rank, floor, { x, last, most })}</g>`
  }

  function bar(kind, from, to, { top, height }, place) {
    const chosen = place === now.place ? " chosen" : "", wide = Math.max(kind.startsWith("pass") ? 1 : 1.5, to - from)
    return `<rect class="${kind}${chosen}" data-place="${place}" x="${from.toFixed(1)}" y="${top}" width="${wide.toFixed(1)}" height="${height}"/>`
  }

  // Bytes held, by kind, one on top of the other.
  function memory(rank, floor, { x, last, most }) {
    const { kinds } = now.recording, own = now.frames.filter((frame) => frame.start[rank] !== null)
    const points = own.map((frame) => [x(frame.start[rank]), frame.held[rank]]).sort((a, b) => a[0] - b[0])
    points.unshift([0, (own[0] || now.frames[0]).held[rank]])
    const height = (bytes) => (bytes / most) * (MEMORY - 2)
    const below = points.map(() => 0)
    return kinds.map((kind, place) => {
      const tops = points.map(([, held], at) => below[at] + held[place])
      const steps = (levels) => levels.map((level, at) => [points[at][0], floor - height(level), points[at + 1]?.[0] ?? x(last)])
      const up = steps(tops).map(([from, y, to]) => `L${from.toFixed(1)},${y.toFixed(1)}H${to.toFixed(1)}`).join("")
      const down = steps(below).reverse().map(([from, y, to]) => `L${to.toFixed(1)},${y.toFixed(1)}H${from.toFixed(1)}`).join("")
      tops.forEach((top, at) => { below[at] = top })
      return `<path class="held-${safe(kind)}" d="M${points[0][0].toFixed(1)},${floor}${up}${down}Z"/>`
    }).join("")
  }

  function axis(first, last, x, width, height) {
    const raw = (last - first) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(raw))
    const unit = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= raw)
    const marks = []
    for (let time = 0; time <= last - first; time += unit) {
      const at = x(first + time), end = at > width - 40
      marks.push(`<line class="tick" x1="${at.toFixed(1)}" x2="${at.toFixed(1)}" y1="0" y2="${height - AXIS + 3}"/>
        <text class="${end ? "end" : ""}" x="${at.toFixed(1)}" y="${height - 4}">${Number((time / 1000).toPrecision(6))} ms</text>`)
    }
    return marks.join("")
  }

  function described(ranks, first, last) {
    const waited = ranks.map((rank) => {
      const all = now.frames.reduce((sum, frame) => sum + (frame.waited[rank] || 0), 0)
      return `rank ${rank} waits ${ms(all)}`
    })
    return `Collectives, passes and bytes held of ${listed(ranks)} over ${ms(last - first)}: ${waited.join(", ")}.`
  }

  // Tables and the page ---------------------------------------------------------------------------

  function ranksTable({ present, waits, frames, ended }) {
    return present.map((rank) => {
      const all = waits[rank].reduce((sum, [, us]) => sum + us, 0)
      const whom = waits[rank].slice(0, 3).map(([other, us]) => `rank ${other}: ${ms(us)}`).join(", ")
      const most = Math.max(...frames.map((frame) => frame.live[rank]))
      const how = ended[rank] === "closed" ? "closed" : ended[rank] || "not ended"
      return [`rank ${rank}`, ms(all), whom, human(most), safe(how)]
    })
  }

  function table(heads, rows) {
    const head = heads.map((name) => `<th scope="col">${safe(name)}</th>`).join("")
    const line = ([first, ...cells]) => `<tr><th scope="row">${first}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`
    return `<thead><tr>${head}</tr></thead><tbody>${rows.map(line).join("")}</tbody>`
  }

  const longest = () => now.frames.reduce((best, frame, place) =>
    Math.max(...frame.waited) > Math.max(...now.frames[best].waited) ? place : best, 0)

  const deeds = {
    first: () => show(0),
    back: () => show(now.place - 1),
    next: () => show(now.place + 1),
    last: () => show(now.frames.length - 1),
    longest: () => show(longest()),
  }
  const KEYS = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last" }

  area.addEventListener("keydown", (event) => {
    const name = KEYS[event.key], own = event.target.closest("input, select, summary, .scroll")
    if (!name || own || event.altKey || event.ctrlKey || event.metaKey) return
    event.preventDefault()
    deeds[name]()
  })
  area.addEventListener("click", (event) => {
    const button = event.target.closest("[data-do]"), place = event.target.closest("[data-place]")
    if (button) deeds[button.dataset.do]()
    if (place) show(Number(place.dataset.place))
  })
  find(".seek").addEventListener("input", (event) => show(Number(event.target.value)))
  find(".steps select").addEventListener("input", (event) => choose(event.target.value))
  window.addEventListener("resize", () => now.recording && draw())
  drop.querySelector("input").addEventListener("change", (event) => take([...event.target.files]))
  drop.querySelector("button").addEventListener("click", () => load(zeroRecordingExample, "the example"))
  const brings = (event) => [...(event.dataTransfer?.types || [])].includes("Files")
  window.addEventListener("dragover", (event) => {
    if (!brings(event)) return
    event.preventDefault() // else the browser would open the file in the page's place
    drop.classList.add("over")
  })
  window.addEventListener("dragleave", (event) => event.relatedTarget || drop.classList.remove("over"))
  window.addEventListener("drop", (event) => {
    if (!brings(event)) return
    event.preventDefault()
    drop.classList.remove("over")
    take([...event.dataTransfer.files])
  })
  return { now, load, ms, human }
})()
