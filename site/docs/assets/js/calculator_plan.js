// What `python -m zero_full plan` computes, for the page of the calculator: no elements of the page in here.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroPlan`; the bytes
// of every kind are in `zeroCalculator` (calculator_data.js), read off zero_full when the site is built.
//
// A shape is {layers, width, heads, vocabulary, context}, of zero_min's GPT. A run is
// {stage, precision, optimizer, ranks, batch, microBatches}. Answers are bytes on the rank that holds most.

const zeroPlan = (() => {
  "use strict"
  const data = zeroCalculator
  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0)
  const most = (numbers) => numbers.reduce((best, each) => Math.max(best, each), 0)
  const roundedUp = (number, multiple) => Math.ceil(number / multiple) * multiple

  // The model: modules, each with its own parameters --------------------------------------------

  // Parameters have numbers in the order in which the model lists them. A tied one, which the last module uses
  // as well, comes first.
  function modelOf(shape) {
    const numel = (dimensions) => dimensions.reduce((n, [times, letter]) => n * times * shape[letter], 1)
    let count = 0
    const built = (node, path) => {
      const parameter = (tied) => (dimensions) => ({ numel: numel(dimensions), tied, place: count++ })
      const own = [...node.tied.map(parameter(true)), ...node.own.map(parameter(false))]
      const inside = (name) => (path ? `${path}.${name}` : name)
      const children = node.repeated
        ? Array.from({ length: shape.layers }, (_, place) => built(node.each[0], inside(String(place))))
        : node.each.map((child) => built(child, inside(child.name)))
      const all = sum(own.map((each) => each.numel)) + sum(children.map((child) => child.numel))
      return { path, called: node.called, own, children, numel: all }
    }
    return built(data.model, "")
  }

  const parametersOf = (node) => [...node.own, ...node.children.flatMap(parametersOf)]

  const countOf = (shape) => modelOf(shape).numel

  // Flat buffers: zero_full/layout ---------------------------------------------------------------

  // At stage 0 nothing is cut, and a rank's slice is the whole; `piece` is what it sends another rank at a time.
  function bufferOf(parameters, run) {
    const starts = [], numels = parameters.map((each) => each.numel)
    let end = 0
    for (const numel of numels) {
      starts.push(end)
      end = roundedUp(end + numel, data.alignment)
    }
    const whole = roundedUp(end, data.alignment * run.ranks)
    const piece = whole / run.ranks
    const slice = run.stage === 0 ? whole : piece
    return { parameters, starts, whole, piece, slice, numbers: sum(numels) }
  }

  // Elements of parameters, so without padding, that each rank owns of a buffer.
  function addOwned(buffer, owned) {
    buffer.parameters.forEach(({ numel }, place) => {
      const start = buffer.starts[place], end = start + numel
      for (let rank = Math.floor(start / buffer.slice); rank * buffer.slice < end; rank += 1) {
        owned[rank] += Math.min(end, (rank + 1) * buffer.slice) - Math.max(start, rank * buffer.slice)
      }
    })
  }

  // Last first, into buckets of limited size; a larger parameter travels alone.
  function bucketsOf(parameters, run) {
    const buckets = []
    let room = 0
    for (const each of [...parameters].reverse()) {
      if (buckets.length === 0 || each.numel > room) {
        buckets.push([])
        room = Math.min(data.limits[run.stage].bucket, run.state === "nvme" ? data.part * run.ranks : Infinity)
      }
      buckets[buckets.length - 1].push(each)
      room -= each.numel
    }
    return buckets.map((bucket) => bufferOf(bucket, run))
  }

  // Units of stage 3: zero_full/shard/units -------------------------------------------------------

  function laidOut(model, run) {
    const limits = data.limits[run.stage]
    if (run.stage < 3 || run.ranks === 1) return { buckets: bucketsOf(parametersOf(model), run), units: [] }
    const limit = Math.max(1, Math.min(Math.ceil(model.numel / data.parts), Math.floor(limits.live / data.liveParts)))
    const stays = [], units = []
    let room = limits.keepTotal, entered = 0
    const walk = (node, unitAround, mayCut) => {
      let unit = unitAround
      if (node.called && mayCut) {
        unit = { path: node.path, own: [], enteredAt: entered }
        units.push(unit)
      }
      entered += node.enters || 0
      for (const each of node.own) {
        if (each.numel <= Math.min(limits.keep, room)) {
          stays.push(each)
          room -= each.numel
        } else {
          unit.own.push(each)
        }
        if (!(each.tied && model.uses)) entered += 1 // else counted where it is used first
      }
      const isOne = node.called && node.path !== "" && node.numel <= limit
      for (const child of node.children) walk(child, unit, mayCut && !isOne)
    }
    walk(model, null, true)
    const used = units.filter((unit) => unit.own.length > 0)
    return {
      buckets: bucketsOf(stays, run),
      units: used.map(({ path, enteredAt, own }) => ({ path, enteredAt, ...bufferOf(own, run) })),
    }
  }

  // Which units are whole at a time: zero_full/shard/gatherer. In elements.
  function played(units, run) {
    const limits = data.limits[run.stage], live = new Set()
    let highest = 0
    const liveNumel = () => sum([...live].map((unit) => unit.whole))
    const hasInside = (outer, inner) => outer.path === "" || inner.path.startsWith(`${outer.path}.`)
    const pass = (order) => {
      let begun = 0, ahead = 0 // so many units are reached or begun early; elements of the latter
      return (needed, place) => {
        needed.forEach((unit) => live.add(unit))
        if (place < begun) ahead -= order[place].whole
        else [begun, ahead] = [place + 1, 0]
        while (
          ahead < limits.prefetch && begun < order.length && order[begun].whole <= limits.live - liveNumel()
        ) {
          live.add(order[begun])
          ahead += order[begun].whole
          begun += 1
        }
        highest = Math.max(highest, liveNumel())
      }
    }
    const leave = (place) => {
      const later = sum(units.slice(place + 1).map((unit) => unit.whole))
      if (!(2 * later < limits.reuse && liveNumel() <= limits.live)) live.delete(units[place])
    }
    const atWork = [], backwards = [...units].reverse()
    const forward = pass(units), backward = pass(backwards)
    units.forEach((unit, place) => {
      while (atWork.length > 0 && !hasInside(units[atWork[atWork.length - 1]], unit)) leave(atWork.pop())
      forward([unit], place)
      atWork.push(place)
    })
    while (atWork.length > 0) leave(atWork.pop())
    const kept = units.map((unit) => live.has(unit))
    backwards.forEach((unit, place) => {
      const around = backwards.slice(place + 1).filter((outer) => hasInside(outer, unit))
      backward([...around, unit], place)
      live.delete(unit)
    })
    return { kept, highest }
  }

  // Bytes -----------------------------------------------------------------------------------------

  function termsOf(run) {
    const shared = run.ranks === 1 ? "alone" : "shared"
    const again = run.microBatches === 1 ? "once" : "again"
    return data.terms[`${run.precision} ${run.stage} ${shared} ${again}`]
  }

  const bytes = (terms, buffer) => sum(Object.keys(terms).map((size) => terms[size] * buffer[size]))
  const stateOf = (run) => data.state[`${run.precision} ${run.optimizer}`]

  const gradientsSent = (terms, run) => terms.sent.once + run.microBatches * terms.sent.each

  // Backward, parameter by parameter from the last one: gradients arrive, buffers fill, and leave when they are
  // complete; a unit, when backward has left its module. The first module, whose inputs need no gradient, tells
  // nobody: then a unit leaves in the end, as small parameters of stage 3 do. A tied gradient waits for its other
  // half, and is the sum of two.
  function onTheirWay(laid, flats, terms, run) {
    const { inFlight } = data.limits[run.stage], pending = [], left = new Set(), filling = new Set(), bufferOfPlace = []
    flats.forEach((flat) => flat.parameters.forEach(({ place }) => (bufferOfPlace[place] = flat)))
    const alone = run.ranks === 1 && run.state, goingDown = []
    const alike = run.state ? termsOf({ ...run, microBatches: 1 }) : terms // nothing is added to on the device
    const ofBuffer = { waiting: terms.parameter, arriving: terms.parameter, reducing: 0 }
    const { waiting, arriving, reducing } = alone ? ofBuffer : alike
    let alive = 0, held = 0, highest = 0
    const parameters = flats.flatMap((flat) => flat.parameters).sort((a, b) => b.place - a.place)
    const note = (extra) => (highest = Math.max(highest, alive + held + extra))
    const reduce = (flat) => {
      if (run.state) { // at most two slices wait for their copies to the host
        while (goingDown.length > 1) held -= goingDown.shift()
        goingDown.push(alone ? waiting * flat.whole : termsAway(run).down * flat.slice)
        held += goingDown[goingDown.length - 1]
        if (alone) alive -= waiting * flat.whole // the buffer itself is copied
      }
      note(reducing * flat.slice)
      if (!alone) alive -= waiting * flat.whole
    }
    const drain = (leave) => {
      while (pending.length > leave) reduce(pending.shift())
    }
    const launch = (flat) => {
      left.add(flat)
      drain(Math.max(0, inFlight - 1))
      pending.push(flat)
      if (inFlight === 0) drain(0)
    }
    const pass = () => {
      left.clear()
      filling.clear()
      parameters.forEach(({ tied, numel }) => (held += tied ? terms.parameter * numel : 0))
      for (const { numel, tied, place } of parameters) {
        const flat = bufferOfPlace[place]
        if (tied) note((arriving + terms.parameter) * numel)
        if (tied) held -= terms.parameter * numel
        if (run.stage > 1 && inFlight > 0 && !left.has(flat)) { // its buffer takes the place of one that has left
          held += arriving * numel
          drain(inFlight - 1)
          held -= arriving * numel
        }
        if (!filling.has(flat)) alive += waiting * flat.whole
        filling.add(flat)
        note(arriving * numel)
        if (run.stage < 3 && flat.parameters[flat.parameters.length - 1].place === place) launch(flat)
        laid.units.filter((unit) => place > 0 && unit.enteredAt === place).reverse().forEach(launch)
      }
      drain(0)
      inOrder(flats).filter((flat) => !left.has(flat)).forEach(launch)
      drain(0)
    }
    // While the last slices of the passes before wait for their copies; from the third on all are alike.
    const passes = run.state ? Math.min(run.microBatches, 3) : 1
    for (let turn = 0; turn < passes; turn += 1) pass()
    return highest
  }

  // The order in which buffers are stepped: that of backward.
  const firstOf = (flat) => Math.min(...flat.parameters.map(({ place }) => place))
  const inOrder = (flats) => [...flats].sort((a, b) => firstOf(b) - firstOf(a))

  // What the optimizer's step makes: for every buffer something that stays until all are stepped, of which stage 3
  // steps a part at a time; and before that, for one that is always whole, something that is gone at once.
  function updating(laid, run) {
    if (run.state) {
      const { bucket, unit, most: atATime } = data.checking[run.precision]
      const read = ({ slice }) => Math.min(unit * slice, atATime)
      const written = ({ slice }) => (bucket > unit ? bucket * slice : 0)
      return most([...laid.buckets, ...laid.units].map(read).concat(laid.buckets.map(written)))
    }
    const { updating, following } = stateOf(run)
    let made = 0, highest = 0, room = 0
    for (const flat of inOrder([...laid.buckets, ...laid.units])) {
      if (run.stage === 3 && flat.slice > room) {
        made = 0
        room = data.limits[run.stage].subGroup
      }
      room -= flat.slice
      highest = Math.max(highest, made + (laid.buckets.includes(flat) ? following : 0) * flat.slice)
      made += updating * flat.slice
      highest = Math.max(highest, made)
    }
    return highest
  }

  function activationsOf(shape, run) {
    const sizes = { ...shape, batch: run.batch }
    const product = (letters) => letters.reduce((n, letter) => n * sizes[letter], 1)
    return sum(data.activations[run.precision].map(([each, letters]) => each * product(letters)))
  }

  function totals(plan) {
    const kept = plan.parameters + plan.gradients + plan.master + plan.moments
    if (plan.gathered === null) return { ...plan, kept, peak: null }
    return { ...plan, kept, peak: kept + Math.max(plan.gathered + plan.buckets + plan.activations, plan.update) }
  }

  // A model whose shape is known: everything.
  const ofShape = (shape, run) => ofModel(modelOf(shape), activationsOf(shape, run), run)

  // With `state`, "cpu" or "nvme", also what waits there.
  function ofModel(model, activations, run) {
    const terms = termsOf(run), laid = laidOut(model, run), flats = [...laid.buckets, ...laid.units]
    const owned = new Array(run.stage === 0 ? 1 : run.ranks).fill(0)
    flats.forEach((flat) => addOwned(flat, owned))
    const play = played(laid.units, run)
    const gathers = sum(laid.units.map((unit, place) => (play.kept[place] ? 1 : 2) * unit.piece))
    const pieces = sum(laid.buckets.map((bucket) => bucket.piece)) + run.microBatches * gathers
    const gradientPieces = sum(flats.map((flat) => flat.piece)), here = run.state ? 0 : 1
    return totals({
      ...(run.state ? waitingOf(laid, flats, run) : { host: 0, disk: 0 }),
      parameters: terms.parameter * (sum(laid.buckets.map((b) => b.whole)) + sum(laid.units.map((u) => u.slice))),
      gradients: here * sum(flats.map((flat) => bytes(terms.gradients, flat))),
      master: here * sum(flats.map((flat) => bytes(terms.master, flat))),
      moments: here * stateOf(run).kept * most(owned),
      gathered: terms.parameter * play.highest,
      buckets: onTheirWay(laid, flats, terms, run),
      activations,
      update: updating(laid, run),
      sent: (run.ranks - 1) * (gradientsSent(terms, run) * gradientPieces + terms.sent.gathered * pieces),
    })
  }

  // A number of parameters and nothing else: what is kept, without padding, and the most that stage 3 can send.
  function ofCount(numel, run) {
    const terms = termsOf(run), piece = Math.ceil(numel / run.ranks), slice = run.stage === 0 ? numel : piece
    const buffer = { whole: numel, slice, numbers: numel }
    const gathers = run.stage === 3 && run.ranks > 1 ? 2 * run.microBatches : 1
    return totals({
      parameters: terms.parameter * (run.stage === 3 ? slice : numel),
      gradients: bytes(terms.gradients, buffer),
      master: bytes(terms.master, buffer),
      moments: stateOf(run).kept * slice,
      gathered: null,
      buckets: null,
      activations: null,
      update: null,
      sent: (run.ranks - 1) * piece * (gradientsSent(terms, run) + gathers * terms.sent.gathered),
    })
  }

  // With offload_optimizer: what waits in the host's memory or in a file, and what moves in a step.
  function waiting(shape, run) {
    const laid = laidOut(modelOf(shape), run)
    return waitingOf(laid, inOrder([...laid.buckets, ...laid.units]), run)
  }

  function termsAway(run) {
    const shared = run.ranks === 1 ? "alone" : "shared", again = run.microBatches === 1 ? "once" : "again"
    return data.waiting[`${run.precision} ${run.stage} ${shared} ${again}`]
  }

  function waitingOf(laid, unordered, run) {
    const terms = termsAway(run), { kept } = stateOf(run), flats = inOrder(unordered)
    const owned = new Array(run.ranks).fill(0)
    flats.forEach((flat) => addOwned(flat, owned))
    const slices = sum(flats.map((flat) => flat.slice)), largest = most(flats.map((flat) => flat.slice))
    const more = kept * (most(owned) - owned[0])
    const down = terms.down * slices * (run.stage > 1 ? run.microBatches : 1), moved = { down, up: terms.up * slices }
    const passing = terms.largest * largest
    const inMemory = terms.slice * slices + passing + kept * most(owned)
    if (run.state === "cpu") return { host: inMemory, disk: 0, ...moved }
    const sizes = flats.map((flat) => roundedUp(sum(tensorsOf(flat, terms.master, run)), data.page))
    const disk = sum(sizes) + more
    return { host: terms.beside * slices + passing + memoryOf(flats, sizes, run), disk, ...moved }
  }

  // What the first rank has of a buffer in its file: the master, and the optimizer's tensors for each parameter.
  function tensorsOf(flat, master, run) {
    const count = data.tensors[run.optimizer], each = count ? stateOf(run).kept / count : 0
    const pieces = flat.parameters.map(({ numel }, place) => Math.min(numel, flat.slice - flat.starts[place]))
    const state = pieces.filter((numel) => numel > 0).map((numel) => count * roundedUp(each * numel, data.apart))
    return [roundedUp(master * flat.slice, data.apart), ...state]
  }

  // What stays in memory: the state of as many elements as may, and at least two parts.
  function memoryOf(flats, sizes, run) {
    const limit = Math.min(data.part, run.stage === 3 ? data.limits[3].subGroup : Infinity), parts = []
    let room = 0
    flats.forEach((flat, place) => {
      if (parts.length === 0 || flat.slice > room) {
        parts.push(0)
        room = limit
      }
      parts[parts.length - 1] += sizes[place]
      room -= flat.slice
    })
    const state = sum(parts), numel = Math.max(sum(flats.map((flat) => flat.slice)), 1)
    const held = Number((BigInt(state) * BigInt(data.inMemory)) / BigInt(numel)) // exact, beyond 2^53
    return Math.min(state, Math.max(2 * most(parts), roundedUp(held, data.page)))
  }

  // Lesson 5, zero_min's Stage2Offload: gradients and optimizer wait on the host. Padded to the ranks only.
  function offloaded(numel, run) {
    const { each, flag } = data.offload, whole = roundedUp(numel, run.ranks), piece = whole / run.ranks
    const sentByAll = (run.ranks - 1) * (each.gradient * run.microBatches * numel + each.parameter * whole + flag)
    return {
      parameters: each.parameter * whole,
      hostGradients: each.gradient * piece,
      hostState: each.state * piece,
      sentByAll,
      downByAll: run.microBatches * each.gradient * numel,
      upByAll: each.parameter * whole,
    }
  }

  // Three digits and a unit; decimal, as in the papers.
  function human(size) {
    for (const [scale, unit] of data.scales) {
      if (size >= scale * 0.9995) {
        const number = size / scale
        return `${number.toFixed(Math.max(0, 3 - String(Math.round(number)).length))} ${unit}`
      }
    }
    return `${size} B`
  }

  return { ofShape, ofModel, ofCount, waiting, offloaded, activationsOf, countOf, human }
})()
