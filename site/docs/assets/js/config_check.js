// A verdict on every key of a configuration: what zero_full/config makes of a text, with its schema and its rules.
// The schema, the remarks and the rules come from there (config_data.js); tests/site compares the verdicts.
// Everything is in `zeroCheck`.

const zeroCheck = (() => {
  "use strict"
  const { same, shown, nearest } = zeroPython
  const TRAIN = "train_batch_size", MICRO = "train_micro_batch_size_per_gpu", STEPS = "gradient_accumulation_steps"
  const ZERO = "zero_optimization", OFFLOAD = "offload_optimizer"
  const OLD_OFFLOAD = "cpu_offload", OLD_PIN = "cpu_offload_use_pin_memory"
  const dotted = (path) => path.join(".")
  const isInt = (value) => typeof value === "bigint" || typeof value === "boolean" // as in Python
  const starts = (path, others) => others.every((name, place) => path[place] === name)

  // What is said of a key: {path, kind, why, remedy, value}, as report.Notice.
  const notice = (path, kind, why, remedy = "", value = "") => ({ path, kind, why, remedy, value })

  function messageOf({ kind, why, value }) {
    const unsupported = value && kind === "refused" ? "not supported" : ""
    return [unsupported, why].filter(Boolean).join(": ")
  }

  function lineOf({ path, kind, why, remedy, value }) {
    let start = dotted(path)
    if (kind === "assumed") start += " is not in the configuration"
    else if (value) start += ` = ${value} ${kind === "refused" ? "is not supported" : "has no effect"}`
    return `${start}: ${[why, remedy].filter(Boolean).join("; ")}`
  }

  // Values by their types -------------------------------------------------------------------------

  const CHANGES = {
    zero_or_one: (value) => (typeof value === "bigint" && value < 2n && value >= 0n ? value === 1n : value),
    lower: (value) => (typeof value === "string" ? value.toLowerCase() : value),
    capital: (value) =>
      typeof value === "string" ? value.slice(0, 1).toUpperCase() + value.slice(1).toLowerCase() : value,
    auto_is_none: (value) => (value === "auto" ? null : value),
    infinity_is_none: (value) => (value === Infinity ? null : value),
    null_is_empty: (value) => (value === null || value === false ? new Map() : value),
    short_dtype: (value) => {
      if (typeof value !== "string") return value
      const bare = value.toLowerCase().replace(/^torch\./, "")
      return Object.hasOwn(zeroConfig.dtypes, bare) ? zeroConfig.dtypes[bare] : bare
    },
    names_or_auto: (value) => {
      const fine = value === "auto" || (Array.isArray(value) && value.every((each) => typeof each === "string"))
      if (!fine) throw 'a list of names, or "auto"'
      return value
    },
  }
  const PLAIN = {
    bool: [(value) => typeof value === "boolean", "bool_type"],
    str: [(value) => typeof value === "string", "string_type"],
    list: [Array.isArray, "list_type"],
    dict: [(value) => value instanceof Map, "dict_type"],
  }

  function whole(value, least, most, rough, exact) {
    const isWhole = typeof value === "bigint" || (typeof value === "number" && Number.isInteger(value))
    if (!isWhole || value < least) throw rough
    if (value > most) throw exact
    return BigInt(value)
  }

  function fraction(value, least, most, orZero, rough, exact) {
    const isNumber = ["bigint", "number"].includes(typeof value) && !Number.isNaN(value)
    if (!isNumber || value < 0 || (same(value, 0n) && !orZero)) throw rough
    if (!same(value, 0n) && !(value >= least && value <= most)) throw exact
    return Number(value)
  }

  // The value as the engine keeps it; throws what is expected instead. `faults` gets those of sections and lists.
  function judged(value, field, path, faults) {
    for (const [step, ...options] of field.steps) {
      if (step === "null" && value === null) return null
      if (step in CHANGES) value = CHANGES[step](value)
      else if (step === "whole") value = whole(value, ...options)
      else if (step === "number") value = fraction(value, ...options)
      else if (step === "literal" && !options[0].some((each) => each === value)) throw options[1]
      else if (step === "model") {
        if (!(value instanceof Map)) throw options[0]
        return section(value, field.model, path, faults)
      } else if (step in PLAIN && !PLAIN[step][0](value)) throw zeroConfig.kinds[PLAIN[step][1]]
    }
    return field.steps.some(([step]) => step === "list") ? names(value, path, faults) : value
  }

  function names(value, path, faults) {
    const wrong = value.map((each, place) => [each, place]).filter(([each]) => typeof each !== "string")
    if (!wrong.length) return value
    for (const [each, place] of wrong) faults.push({ path: [...path, place], value: each, expected: "a string" })
    return undefined
  }

  function defaultOf(field) {
    if (field.default !== undefined) return field.default instanceof Object && !Array.isArray(field.default) ? new Map() : field.default
    return section(new Map(), field.model, [], [])
  }

  // A section with a default in the place of what cannot be used; null if it lacks what it must have.
  function section(given, model, path, faults) {
    const made = {}
    let complete = true
    for (const [name, field] of Object.entries(model.fields)) {
      const here = [...path, name]
      made[name] = undefined
      if (!given.has(name)) {
        if (field.required) faults.push({ path: here, missing: true })
      } else {
        try {
          made[name] = judged(given.get(name), field, here, faults)
        } catch (expected) {
          if (typeof expected !== "string") throw expected
          faults.push({ path: here, value: given.get(name), expected })
        }
      }
      if (made[name] === undefined && field.required) complete = false
      else if (made[name] === undefined) made[name] = defaultOf(field)
    }
    for (const name of given.keys()) {
      if (!Object.hasOwn(model.fields, name)) faults.push({ path: [...path, name], unknown: true, value: given.get(name) })
    }
    return complete ? made : undefined
  }

  function modelAt(path) {
    let model = zeroConfig.schema
    for (const name of path) model = model && Object.hasOwn(model.fields, name) ? model.fields[name].model : undefined
    return model || zeroConfig.schema
  }

  function strange(path) {
    const name = path[path.length - 1], above = path.slice(0, -1), here = Object.keys(modelAt(above).fields)
    const elsewhere = zeroConfig.keys.filter((key) => key.split(".").pop() === name)
    const near = nearest(name, here)
    if (elsewhere.length) {
      const places = elsewhere.slice(0, 3).map((key) => (key.includes(".") ? key : `${key} at the top level`))
      return ["unknown here", `it belongs at ${places.join(" or ")}`]
    }
    if (near) return ["unknown key", `did you mean ${dotted([...above, near])}?`]
    if (here.includes("params")) {
      return ["unknown key", `put arguments of the ${path[0]} into ${dotted([...above, "params"])}`]
    }
    const known = here.length <= 12 ? `; the keys here are ${here.join(", ")}` : ""
    return [`unknown key, and no key has a similar name${known}`, "remove it"]
  }

  function explained(fault, spelled) {
    const path = asWritten(fault.path, spelled)
    if (fault.unknown) {
      const name = path[path.length - 1], { notRead } = zeroConfig
      const why = name.startsWith("_") ? zeroConfig.comment : Object.hasOwn(notRead, name) ? notRead[name] : ""
      if (why) return notice(path, "no effect", why, "", shown(fault.value))
    }
    if (fault.unknown) return notice(path, "refused", ...strange(fault.path))
    if (fault.missing) {
      return notice(path, "refused", "missing", `set it, or remove ${dotted(fault.path.slice(0, -1))}`)
    }
    if (fault.value === "auto") return unfilled(path, dotted(fault.path), fault.expected)
    return notice(path, "refused", `got ${shown(fault.value)}, expected ${fault.expected}`)
  }

  function unfilled(path, key, expected) {
    const filler = Object.hasOwn(zeroConfig.fillers, key) ? zeroConfig.fillers[key] : ""
    const nobody = 'neither Hugging Face\'s Trainer nor Accelerate fills in "auto" here'
    const why = filler ? `only ${filler} can fill in "auto"` : nobody
    return notice(path, filler ? "unfilled" : "refused", why, `set a value: ${expected}`)
  }

  // Second names ------------------------------------------------------------------------------------

  function asWritten(path, spelled) {
    const found = spelled.find(([ours]) => starts(path, ours))
    return found ? [...found[1], ...path.slice(found[0].length)] : path
  }

  const copied = (map) => new Map([...map].map(([key, value]) => [key, value instanceof Map ? copied(value) : value]))

  // In place: values move to the first names of their keys.
  function renamed(raw) {
    const zero = raw.get(ZERO), moves = [[raw, "bfloat16", "bf16", []]], spelled = [], notices = []
    if (zero instanceof Map) {
      const { fields } = zeroConfig.schema.fields[ZERO].model
      const short = [...zero.keys()].filter((key) => !Object.hasOwn(fields, key) && Object.hasOwn(fields, `stage3_${key}`))
      moves.push(...short.map((key) => [zero, key, `stage3_${key}`, [ZERO]]))
    }
    for (const [level, old, now, above] of moves) {
      if (!level.has(old)) continue
      const value = level.get(old)
      level.delete(old)
      if (level.has(now)) {
        const why = `an alias of ${dotted([...above, now])}, which is set as well`
        notices.push(notice([...above, old], "refused", why, "remove one of them"))
        continue
      }
      level.set(now, value)
      spelled.push([[...above, now], [...above, old]])
    }
    if (zero instanceof Map && isInt(zero.get(OLD_OFFLOAD)) && same(zero.get(OLD_OFFLOAD), 1n)) {
      notices.push(...offloadAsItWas(zero, spelled))
    }
    return [spelled, notices]
  }

  function offloadAsItWas(zero, spelled) {
    if ((zero.get(OFFLOAD) ?? null) !== null) {
      return [notice([ZERO, OLD_OFFLOAD], "refused", `deprecated, and ${OFFLOAD} is set as well`, "remove it")]
    }
    const pin = zero.get(OLD_PIN) ?? null, made = new Map([["device", "cpu"]])
    zero.delete(OLD_OFFLOAD)
    zero.delete(OLD_PIN)
    zero.set(OFFLOAD, made)
    spelled.push([[ZERO, OFFLOAD, "device"], [ZERO, OLD_OFFLOAD]])
    if (pin !== null) {
      made.set("pin_memory", pin)
      spelled.push([[ZERO, OFFLOAD, "pin_memory"], [ZERO, OLD_PIN]])
    }
    return []
  }

  // Remarks and rules -------------------------------------------------------------------------------

  // Every key that the schema does not divide further: {path, value, default, remark}.
  function entriesOf(config, model = zeroConfig.schema, above = []) {
    return Object.entries(model.fields).flatMap(([name, field]) => {
      const value = config[name], path = [...above, name]
      if (field.model && value !== null) return entriesOf(value, field.model, path)
      return [{ path, value, default: field.required ? undefined : defaultOf(field), remark: field.remark }]
    })
  }

  function switchesIn(map) {
    return [...map].flatMap(([key, value]) => {
      if (value instanceof Map) return switchesIn(value)
      return key === "enabled" ? [isTrue(value)] : []
    })
  }

  function isTrue(value) {
    if (Array.isArray(value)) return value.length > 0
    return value instanceof Map ? value.size > 0 : Boolean(value) || Number.isNaN(value)
  }

  const WHEN = {
    is_on: (value) => {
      if (!(value instanceof Map)) return isTrue(value)
      const switches = switchesIn(value)
      return switches.length ? switches.some(Boolean) : value.size > 0
    },
    more_than_one: (value) => (typeof value === "boolean" ? false : value > 1n),
    names_some: (value) => value !== "auto" && !same(value, []),
  }

  // [[route, value]]: where in a key's value what a remark is about is asked for.
  function asking(remark, value, usual) {
    const asks = (found, usually) => (remark.when ? WHEN[remark.when](found) : !same(found, usually))
    if (!remark.switches.length) return asks(value, usual) ? [[[], value]] : []
    return switched(remark, value).filter(([, found]) => isInt(found) && asks(found, 0n)) // others are refused
  }

  function switched(remark, section) {
    const at = (level, name) => (level instanceof Map ? level.get(name) : undefined)
    const found = remark.switches.map((route) => [route, route.reduce(at, section)])
    return found.filter(([, value]) => value !== undefined)
  }

  function* wrongSwitches(entries) {
    for (const { path, value, remark } of entries) {
      const kind = remark && remark.when ? "a whole number" : "true or false"
      for (const [route, found] of remark ? switched(remark, value) : []) {
        if (!isInt(found)) yield notice([...path, ...route], "refused", `got ${shown(found)}, expected ${kind}`)
      }
    }
  }

  const isKnown = (key, bad) => !bad.some((each) => key === each || key.startsWith(`${each}.`))
  const knownRules = (rules, bad) => [...rules].filter(({ key, read }) => [key, ...read].every((each) => isKnown(each, bad)))

  function* remarked(entries, config, spelled, bad) {
    const { stage } = config[ZERO]
    for (const { path, value, default: usual, remark } of entries) {
      if (!remark) continue
      if (remark.belowStage < 99 && (stage >= remark.belowStage || !isKnown(`${ZERO}.stage`, bad))) continue
      const written = asWritten(path, spelled), kind = remark.refuses ? "refused" : "no effect"
      for (const [route, found] of asking(remark, value, usual)) {
        yield notice([...written, ...route], kind, remark.text, remark.remedy, shown(found))
      }
    }
  }

  function* together(entries, rules, spelled, bad) {
    const byKey = new Map(entries.map((entry) => [dotted(entry.path), entry]))
    for (const { key, why, remedy } of knownRules(rules, bad)) {
      const path = asWritten(key.split("."), spelled), entry = byKey.get(key)
      if (remedy) yield notice(path, "refused", why, remedy)
      else if (!same(entry.value, entry.default)) yield notice(path, "no effect", why, "", shown(entry.value))
    }
  }

  // "auto" where the schema accepts any text.
  function* unfilledTexts(config) {
    for (const name of ["optimizer", "scheduler"]) {
      for (const [argument, value] of config[name] ? config[name].params : []) {
        const path = [name, "params", argument], expected = argument === "betas" ? "two numbers" : "a number"
        if (value === "auto") yield unfilled(path, dotted(path), expected)
      }
    }
    for (const name of [OFFLOAD, "offload_param"]) {
      const part = config[ZERO][name], path = [ZERO, name, "nvme_path"]
      if (part !== null && part.nvme_path === "auto") yield unfilled(path, dotted(path), "a directory")
    }
  }

  function* assumptions(config, raw, bad) {
    for (const { key, why, remedy } of knownRules(zeroConfigRules.assumed_defaults(config), bad)) {
      const found = key.split(".").reduce((level, name) => (level instanceof Map ? level.get(name) : undefined), raw)
      if (found === undefined) yield notice(key.split("."), "assumed", why, remedy)
    }
  }

  function examine(given, world) {
    const raw = copied(given), faults = []
    for (const key of [TRAIN, MICRO, STEPS]) if (raw.get(key) === null) raw.delete(key) // how a launcher leaves one out
    const [spelled, clashing] = renamed(raw), config = section(raw, zeroConfig.schema, [], faults)
    const unfilledOnes = [...unfilledTexts(config)]
    const bad = [...faults, ...unfilledOnes].map((each) => dotted(each.path)), entries = entriesOf(config), rules = zeroConfigRules
    const notices = [
      ...clashing,
      ...faults.map((fault) => explained(fault, spelled)),
      ...wrongSwitches(entries),
      ...remarked(entries, config, spelled, bad),
      ...together(entries, rules.conflicts(config, world), spelled, bad),
      ...unfilledOnes,
      ...together(entries, rules.ineffective_keys(config), spelled, bad),
      ...assumptions(config, raw, bad),
    ]
    const isWarning = ({ kind }) => !["refused", "unfilled"].includes(kind)
    notices.sort((one, other) => isWarning(one) - isWarning(other))
    return { config, spelled, bad, entries, notices }
  }

  // Verdicts ----------------------------------------------------------------------------------------

  const verdict = (path, { line, column }, kind, message = "", remedy = "", text = "") =>
    ({ path, line, column, kind, message, remedy, text })
  const inOrder = (verdicts) => verdicts.sort((one, other) => one.line - other.line || one.column - other.column)

  // {verdicts, world}: of a text, for so many ranks (a BigInt), or for as many as it was written for (null).
  function check(text, world) {
    let parsed
    try {
      parsed = zeroRead.parse(text)
      if (!(parsed.value instanceof Map)) {
        const place = parsed.places.get(zeroRead.keyOf([])), remedy = "write keys and values between { and }"
        throw new zeroRead.NotJson("a configuration must be an object", remedy, place)
      }
    } catch (error) {
      if (!(error instanceof zeroRead.NotJson)) throw error
      const found = verdict([], error.place, "refused", error.why, error.remedy, error.message)
      return { verdicts: [found], world: world ?? 1n }
    }
    const ranks = world ?? impliedWorld(parsed.value), examined = examine(parsed.value, ranks)
    const nearest = (path) => {
      while (!parsed.places.has(zeroRead.keyOf(path))) path = path.slice(0, -1)
      return parsed.places.get(zeroRead.keyOf(path))
    }
    const twice = parsed.repeated.map(([path, place]) => [place, notice(path, "refused", "duplicate key", "remove one of them")])
    const said = [...twice, ...examined.notices.map((each) => [nearest(each.path), each])].map(([place, each]) =>
      verdict(each.path, place, each.kind, messageOf(each), each.remedy, lineOf(each)))
    return { verdicts: inOrder([...inOrder(said), ...calm(parsed, examined, said, nearest)]), world: ranks }
  }

  function impliedWorld(given) {
    const count = (map, key) => {
      const given = map instanceof Map ? map.get(key) : 0n
      const value = isInt(given) || Number.isInteger(given) ? BigInt(given) : 0n
      return value > 0n && value < 2n ** 31n ? value : 0n
    }
    const [train, micro, steps] = [TRAIN, MICRO, STEPS].map((key) => count(given, key))
    const unit = micro * (steps || 1n)
    if (train && unit && train % unit === 0n) return train / unit
    const groups = ["mics_shard_size", "zero_hpz_partition_size"].map((key) => count(given.get(ZERO), key))
    return groups.reduce((most, each) => (each > most ? each : most), 1n)
  }

  function keyAround(path) {
    const end = path.findIndex((name) => typeof name !== "string")
    return end < 0 ? path : path.slice(0, end)
  }

  // About each key that nothing is said about and that holds no keys with verdicts of their own.
  function calm(parsed, examined, said, nearest) {
    const { keyOf } = zeroRead, made = []
    const loud = new Set(said.map(({ path }) => keyOf(keyAround(nearest(path).path))))
    const refused = new Set(said.filter(({ kind }) => kind === "refused").map(({ path }) => keyOf(path)))
    const keys = [...parsed.places.values()].filter(({ path }) => path.length && keyAround(path) === path)
    const above = (path) => path.map((_, length) => path.slice(0, length))
    const around = new Set(keys.flatMap(({ path }) => above(path).map(keyOf)))
    const firstNames = examined.spelled.map(([ours, theirs]) => [theirs, ours]), lookup = lookupOf(examined)
    for (const place of keys) {
      const { path } = place
      if (loud.has(keyOf(path)) || around.has(keyOf(path))) continue
      let [kind, message] = lookup(asWritten(path, firstNames))
      for (const each of above(path).slice(1)) {
        if (refused.has(keyOf(each))) [kind, message] = ["unread", `${dotted(each)} is invalid`]
      }
      if (path.slice(0, -1).some((name) => name.startsWith("_"))) [kind, message] = ["unread", zeroConfig.unread]
      made.push(verdict(path, place, kind, message, "", message ? `${dotted(path)}: ${message}` : ""))
    }
    return made
  }

  function lookupOf({ config, bad, entries }) {
    const byKey = new Map(entries.map((entry) => [zeroRead.keyOf(entry.path), entry]))
    const unread = new Map(knownRules(zeroConfigRules.unread_keys(config), bad).map(({ key, why }) => [key, why]))
    return (path) => {
      const entry = byKey.get(zeroRead.keyOf(path)), key = dotted(path)
      if (["optimizer.type", "scheduler.type"].includes(key) && entry) return ["unknown", zeroConfig.inARun]
      if (unread.has(key)) return ["unread", unread.get(key)]
      if (entry) return [same(entry.value, entry.default) ? "default" : "ok", ""]
      const inside = path.map((_, length) => byKey.get(zeroRead.keyOf(path.slice(0, length)))).find(Boolean)
      if (!inside) return ["default", ""] // a section without keys, or null for a batch size
      if (inside.value === null) return ["unread", `${dotted(inside.path)} cannot be used`]
      if (inside.path[inside.path.length - 1] === "params") return ["unknown", zeroConfig.inTorch]
      const route = path.slice(inside.path.length)
      const isSwitch = inside.remark && inside.remark.switches.some((each) => same(each, route))
      return isSwitch ? ["default", ""] : ["unread", zeroConfig.unread]
    }
  }

  return { check }
})()
