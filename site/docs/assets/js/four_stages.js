// Four stages on one clock: plays four_stages_data.js (`zeroFourStages`), made by site/hooks/four_stages.py.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroFourStagesPage`.

const zeroFourStagesPage = (() => {
  "use strict"
  const { ranks: RANKS, numel: NUMEL, kinds: KINDS, cut: CUT, clock, stages } = zeroFourStages
  const player = document.getElementById("four-stages")
  const find = (selector) => player.querySelector(selector)
  const still = window.matchMedia("(prefers-reduced-motion: reduce)")
  const LAST = clock.length - 1
  const MOST = Math.max(...stages.map((stage) => stage[LAST].most)) / NUMEL
  const PICTURE = 1200 // how wide a saved picture is, in its own pixels; the file has twice as many
  const now = { place: 0, timer: null, pace: 340, rest: 3500, seen: false }
  const one = (bytes) => (bytes / NUMEL).toFixed(1)
  const total = (moment) => Object.values(moment.bytes).reduce((a, b) => a + b)

  // The picture -----------------------------------------------------------------------------------
  // One function draws what the page shows and what is saved. Its colours are the page's.

  const text = (x, y, words, more = "") => `<text x="${x}" y="${y}" ${more}>${words}</text>`
  const rect = (x, y, width, height, more) => `<rect x="${x}" y="${y}" width="${width}" height="${height}" ${more}/>`
  const fill = (kind) => `fill="${kind === "gathered" ? "url(#gathered)" : `var(--${kind})`}"`
  const STRIPES = `<defs><pattern id="gathered" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="6" height="6" fill="var(--parameters)"/><rect width="2.4" height="6" fill="var(--md-default-bg-color)"/></pattern></defs>`

  function layout(width) {
    const narrow = width < 560, left = narrow ? 19 : width > 1000 ? 30 : 24, gap = narrow ? 7 : 22
    const panel = (width - left - 3 * gap) / 4, meter = Math.round(panel * 0.28)
    const high = narrow ? 180 : width > 1000 ? 320 : 210, size = narrow ? 12 : width > 1000 ? 18 : 14
    const line = Math.round(1.17 * size), top = 2 * line + size + 8, floor = top + high
    return { left, gap, panel, meter, high, top, floor, size, line, height: floor + 3 * line + 8 }
  }

  function drawing(width, place) {
    const at = layout(width), y = (bytes) => at.floor - (bytes / MOST) * at.high
    const parts = [STRIPES]
    for (const level of [0, 4, 8, 12, 16]) {
      parts.push(text(at.left - 5, y(level) + at.size / 3, level, 'class="quiet" text-anchor="end"'))
      parts.push(`<line x1="${at.left}" x2="${width}" y1="${y(level)}" y2="${y(level)}" stroke="var(--line)"/>`)
    }
    stages.forEach((stage, number) => {
      const x = at.left + number * (at.panel + at.gap)
      parts.push(...strip(stage, place, { ...at, x, y: (bytes) => y(bytes / NUMEL) }, number))
    })
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${at.height}" width="${width}" height="${at.height}"
      font-size="${at.size}" role="img" aria-label="${described(place)}">${parts.join("")}</svg>`
  }

  // One stage: a bar of what is there now, beside it the whole step, and what is still to come behind a veil.
  function strip(stage, place, at, number) {
    const { x, y, panel, meter, floor, top, line } = at, moment = stage[place]
    const start = x + meter + 4, step = (panel - meter - 4) / clock.length, right = x + panel
    const parts = [text(x, line - 2, `stage ${number}`, 'font-weight="700"'), text(x, 2 * line - 2, CUT[number], 'class="quiet"')]
    const under = stage.map(() => 0)
    let low = 0
    for (const kind of Object.keys(KINDS)) {
      const upper = stage.map(({ bytes }, i) => under[i] + bytes[kind])
      const over = upper.map((bytes, i) => `L${start + i * step},${y(bytes)}H${start + (i + 1) * step}`)
      const back = under.map((bytes, i) => `L${start + (i + 1) * step},${y(bytes)}H${start + i * step}`).reverse()
      parts.push(`<path d="M${start},${floor}${over.join("")}${back.join("")}Z" ${fill(kind)}/>`)
      const high = low + moment.bytes[kind]
      if (high > low) parts.push(rect(x, y(high), meter, y(low) - y(high), `class="now ${kind}" ${fill(kind)}`))
      upper.forEach((bytes, i) => (under[i] = bytes))
      low = high
    }
    const cursor = start + (place + 1) * step
    parts.push(
      rect(cursor, top - 6, Math.max(0, right - cursor), floor - top + 6, 'class="veil" fill="var(--md-default-bg-color)" fill-opacity="0.84"'),
      `<line x1="${cursor}" x2="${cursor}" y1="${top - 6}" y2="${floor}" stroke="var(--md-default-fg-color)" stroke-width="1.5"/>`,
      `<line x1="${x}" x2="${right}" y1="${y(moment.most)}" y2="${y(moment.most)}" stroke="var(--md-default-fg-color)" stroke-dasharray="4 3"/>`,
      `<line x1="${x}" x2="${right}" y1="${floor}" y2="${floor}" stroke="var(--quiet)"/>`,
      text(right, y(moment.most) - 4, `most ${one(moment.most)}`, 'class="halo" text-anchor="end"'),
      text(x, floor + line + 1, `now ${one(total(moment))}`, 'font-weight="700"'),
      text(x, floor + 2 * line + 1, `sent ${one(moment.sent)}`),
      text(x, floor + 3 * line + 1, moment.does, 'class="quiet"'),
    )
    return parts
  }

  function described(place) {
    const said = stages.map((stage, number) => {
      const moment = stage[place]
      return `stage ${number} holds ${one(total(moment))}, at most ${one(moment.most)} so far, and has sent ${one(moment.sent)}`
    })
    return `${clock[place].title}. Bytes per parameter on one rank of ${RANKS}: ${said.join("; ")}.`
  }

  // Moments -----------------------------------------------------------------------------------------

  function draw() {
    find(".strips").innerHTML = drawing(Math.max(280, find(".strips").clientWidth), now.place)
  }

  function show(place) {
    now.place = Math.max(0, Math.min(place, LAST))
    const { title, text: words } = clock[now.place]
    find(".caption strong").textContent = `${title}.`
    find(".caption span").textContent = words
    find(".seek").value = now.place
    find(".seek").setAttribute("aria-valuetext", `${now.place} of ${LAST}: ${title}`)
    find(".link output").textContent = ""
    draw()
  }

  // From the start again at the end, until the reader does something. Out of sight it keeps still.
  function play() {
    const tick = () => {
      if (now.seen) show(now.place === LAST ? 0 : now.place + 1)
      now.timer = setTimeout(tick, now.place === LAST ? now.rest : now.pace)
    }
    pause()
    find(".play").textContent = "Pause"
    find(".caption").setAttribute("aria-live", "off") // a screen reader is not to talk all the time
    now.timer = setTimeout(tick, now.pace)
  }

  function pause() {
    clearTimeout(now.timer)
    now.timer = null
    find(".play").textContent = "Play"
    find(".caption").setAttribute("aria-live", "polite")
  }

  const deeds = {
    first: () => show(0),
    back: () => show(now.place - 1),
    next: () => show(now.place + 1),
    last: () => show(LAST),
    link: () => copy(),
    picture: () => save(),
  }

  function act(name) {
    const wasPlaying = now.timer !== null
    pause()
    if (name !== "play") deeds[name]()
    else if (!wasPlaying) play()
  }

  // To take away --------------------------------------------------------------------------------------

  function address() {
    const url = new URL(location.href)
    url.searchParams.set("moment", clock[now.place].name)
    url.hash = "four-stages"
    return url.href
  }

  async function copy() {
    const field = find(".link input"), said = find(".link output")
    field.value = address()
    find(".link").hidden = false
    field.select()
    try {
      await navigator.clipboard.writeText(field.value)
      said.textContent = "copied"
    } catch {
      said.textContent = "selected: copy it with the keyboard" // this browser does not let a page copy
    }
  }

  // The picture with its title, caption and legend, as a file of its own: colours are written out.
  function poster() {
    const below = layout(PICTURE - 80).height + 162, high = below + 44, { title, text: words } = clock[now.place]
    let x = 40
    const legend = Object.entries(KINDS).map(([kind, name]) => {
      const said = rect(x, below, 20, 16, fill(kind)) + text(x + 28, below + 14, name, 'font-size="17"')
      x += 56 + 8.9 * name.length
      return said
    })
    const parts = [
      rect(0, 0, PICTURE, high, 'fill="var(--md-default-bg-color)"'),
      text(40, 48, find(".what").textContent, 'font-size="20"'),
      text(40, 92, title, 'font-size="22" font-weight="700"'),
      text(40, 120, words, 'font-size="19"'),
      `<g transform="translate(40 142)">${drawing(PICTURE - 80, now.place)}</g>`,
      ...legend,
    ]
    const style = getComputedStyle(player)
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${PICTURE} ${high}" width="${2 * PICTURE}"
      height="${2 * high}"><style>text { font-family: Inter, system-ui, sans-serif; fill: var(--md-default-fg-color) }
      .quiet { fill: var(--quiet) } .halo { paint-order: stroke; stroke: var(--md-default-bg-color); stroke-width: 4px }</style>${parts.join("")}</svg>`
    return svg.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim())
  }

  async function save() {
    const image = new Image(), canvas = document.createElement("canvas"), link = document.createElement("a")
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(poster())}`
    await image.decode()
    Object.assign(canvas, { width: image.width, height: image.height })
    canvas.getContext("2d").drawImage(image, 0, 0)
    link.href = canvas.toDataURL("image/png")
    link.download = `zero-four-stages-${clock[now.place].name}.png`
    link.click()
  }

  // The page --------------------------------------------------------------------------------------------

  const KEYS = { ArrowRight: "next", ArrowLeft: "back", Home: "first", End: "last", " ": "play" }

  function pressed(event) {
    const name = KEYS[event.key], own = event.target.closest("input, a")
    if (!name || own || event.altKey || event.ctrlKey || event.metaKey) return // they know these keys themselves
    if (event.key === " " && event.target.closest("button")) return
    event.preventDefault()
    act(name)
  }

  function begin() {
    const sample = (kind) => `<svg width="16" height="14" aria-hidden="true">${rect(0, 0, 16, 14, fill(kind))}</svg>`
    find(".legend").innerHTML = Object.entries(KINDS).map(([kind, name]) => `<li>${sample(kind)}${name}</li>`).join("")
    find(".seek").max = LAST
    const asked = new URLSearchParams(location.search).get("moment")
    const place = clock.findIndex(({ name }) => name === asked)
    if (place >= 0) return show(place)
    show(still.matches ? LAST : 0)
    if (asked !== null) find(".caption span").textContent = `The link names a moment that is not in this step: ${asked}.`
    else if (!still.matches) play()
  }

  player.addEventListener("keydown", pressed)
  player.addEventListener("click", (event) => {
    const button = event.target.closest("button")
    if (button && button.dataset.do) act(button.dataset.do)
  })
  find(".seek").addEventListener("input", (event) => {
    pause()
    show(Number(event.target.value))
  })
  new IntersectionObserver(([entry]) => (now.seen = entry.isIntersecting)).observe(find(".strips"))
  window.addEventListener("resize", draw)
  begin()
  return { now, act, show, address, poster }
})()
