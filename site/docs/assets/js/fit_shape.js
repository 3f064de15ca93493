// From a config.json to a model's shape, as zero_full/fit/hf_config.py and activation_estimate.py: no elements of the page in here.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroFitShape`; the
// families are in `zeroFitData` (fit_data.js), read from zero_full/fit/families.txt when the site is built.

const zeroFitShape = (() => {
  "use strict"
  const data = zeroFitData
  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0)
  const product = (names, sizes) => names.reduce((n, each) => n * (typeof each === "number" ? each : sizes[each]), 1)
  const holds = (when, sizes) => when === "" || Boolean(sizes[when.replace("!", "")]) !== when.startsWith("!")
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value)
  const grouped = (number) => number.toLocaleString("en")

  function shown(value) {
    const text = JSON.stringify(value)
    return text.length <= 60 ? text : `${text.slice(0, 57)}...`
  }

  function evaluated({ terms }, sizes) {
    return sum(terms.map(([sign, factors, divisors]) => {
      const dividend = product(factors, sizes), divisor = product(divisors, sizes)
      if (dividend % divisor) throw { dividend: factors[0], divisor: divisors[0] }
      return (sign * dividend) / divisor
    }))
  }

  // Sizes -----------------------------------------------------------------------------------------

  // {family, sizes, notes} of what a config.json says. An Error names the key that is wrong or missing.
  function shapeOf(config) {
    if (!isObject(config)) throw Error(`config.json must be a JSON object, not ${shown(config)}`)
    const family = familyOf(config), sizes = {}, notes = architecture(config, family)
    for (const size of family.sizes) {
      if (size.name in sizes || !holds(size.when, sizes)) continue
      sizes[size.name] = valueOf(size, config, family, sizes, notes)
    }
    for (const each of family.requirements) {
      if (holds(each.when, sizes)) check(each, config, family, sizes)
    }
    if (sizes.layers > data.mostLayers) {
      const most = grouped(data.mostLayers)
      throw Error(`${keyOf(family, "layers")}: ${grouped(sizes.layers)} layers exceed the limit of ${most}`)
    }
    return { family, sizes, notes }
  }

  function familyOf(config) {
    const name = config.model_type ?? null
    if (name === null) throw Error("model_type is missing: it names the model's family")
    if (typeof name === "string" && Object.hasOwn(data.families, name)) return data.families[name]
    const inner = isObject(config.text_config) ? config.text_config.model_type : undefined
    const known = typeof inner === "string" && Object.hasOwn(data.families, inner)
    const more = known ? `. Its text_config is (${inner}): pass that alone` : ""
    const all = Object.keys(data.families).sort().join(", ")
    throw Error(`model_type: ${shown(name)} is not supported, only ${all}${more}`)
  }

  function architecture({ architectures }, family) {
    if (!Array.isArray(architectures) || !architectures.length || architectures.includes(family.model)) return []
    return [`architectures: ${shown(architectures[0])}; counted as ${family.model}`]
  }

  const keyOf = (family, name) => (family.sizes.find((size) => size.name === name && size.key) || { key: name }).key

  function valueOf(size, config, family, sizes, notes) {
    const given = size.key === null ? null : (config[size.key] ?? null)
    if (given !== null) return givenValue(size, given)
    if (size.default === null) throw Error(`${size.key} is missing: ${family.model_type} requires it`)
    const isFlag = typeof size.default === "boolean"
    const value = isFlag ? size.default : computed(size.default, family, sizes)
    if (size.key !== null) notes.push(`${size.key}: not given, so ${isFlag ? value : grouped(value)}`)
    return Number(value)
  }

  function givenValue(size, given) {
    if (typeof size.default === "boolean") {
      if (typeof given !== "boolean") throw Error(`${size.key}: ${shown(given)} is not true or false`)
      return Number(given)
    }
    if (!Number.isInteger(given) || given < size.least || given > data.most) {
      throw Error(`${size.key}: ${shown(given)} is not a whole number from ${size.least} to ${grouped(data.most)}`)
    }
    return given
  }

  function computed(expression, family, sizes) {
    let value
    try {
      value = evaluated(expression, sizes)
    } catch (remainder) {
      const names = [remainder.dividend, remainder.divisor]
      const [dividend, divisor] = names.map((name) => [keyOf(family, name), sizes[name]])
      const numbers = `${grouped(dividend[1])} is not divisible by ${divisor[0]}, ${grouped(divisor[1])}`
      throw Error(`${dividend[0]}: ${numbers}`)
    }
    if (value >= 0) return value
    const [first, second] = expression.terms.map(([, factors]) => keyOf(family, factors[0]))
    throw Error(`${second} is larger than ${first}`)
  }

  const isNothing = (given) => given === null || given === false || given === 0 || given === "" ||
    (typeof given === "object" && Object.keys(given).length === 0)

  function check({ key, value }, config, family, sizes) {
    const given = config[key] ?? null, isFlag = typeof value === "boolean"
    const wanted = value === null ? "none" : isFlag ? value : evaluated(value, sizes)
    if (value === null ? isNothing(given) : given === null || given === wanted) return
    throw Error(`${key}: ${shown(given)} is not supported for ${family.model_type}, only ${wanted}`)
  }

  // Modules ---------------------------------------------------------------------------------------

  function tooLarge({ shape }, numel, family) {
    const first = shape[0].terms[0][1].find((name) => typeof name === "string")
    const said = `a parameter of ${grouped(numel)} elements exceeds the limit of ${grouped(data.mostNumel)}`
    throw Error(`${keyOf(family, first)}: ${said}`)
  }

  // As calculator_plan.js has them. A first parameter that is used again belongs to the whole model, which `holds`
  // it, and so does every module around one of its uses.
  function modelOf({ family, sizes }) {
    let count = 0, tied = null, first = null
    const isSame = (weight) => weight.same !== null && holds(weight.same, sizes)
    const isUsedAgain = (node) => node.weights.some(isSame) || node.inside.some(isUsedAgain)
    const again = family.modules.some(isUsedAgain)
    const built = (node, path, called) => {
      const own = []
      let uses = false, enters = 0
      for (const weight of node.weights.filter(({ when }) => holds(when, sizes))) {
        if (isSame(weight)) {
          uses = true
          continue
        }
        const numel = weight.shape.reduce((n, each) => n * evaluated(each, sizes), 1)
        if (numel > data.mostNumel) tooLarge(weight, numel, family)
        const made = { numel, tied: again && first === null, place: count++ }
        first = first || made
        if (made.tied) [tied, uses, enters] = [made, true, 1]
        else own.push(made)
      }
      const kinds = node.inside.map((child) => [child, child.count === null ? 1 : evaluated(child.count, sizes)])
      const isList = node.inside.some((child) => child.count !== null)
      const children = []
      for (const [child, times] of kinds) {
        for (let turn = 0; turn < times; turn += 1) {
          const name = child.name || String(children.length)
          children.push(built(child, path ? `${path}.${name}` : name, true))
        }
      }
      uses = uses || children.some((child) => child.uses)
      const inside = sum(own.map((each) => each.numel)) + sum(children.map((child) => child.inside))
      return { path, called: called && !isList, own, children, uses, enters, inside, numel: inside }
    }
    const model = built({ weights: [], inside: family.modules }, "", true)
    if (tied !== null) {
      model.own.push(tied)
      const weigh = (node) => {
        if (node.uses) node.numel += tied.numel
        node.children.forEach(weigh)
      }
      weigh(model)
    }
    return model
  }

  // Bytes of activations at the most, where backward begins; null: nobody has measured them.
  function activationsOf({ family, sizes }, { sequences, context, checkpoints }, parameterBytes) {
    const of = (part) => family.saved[`${8 * parameterBytes} ${part}`]
    if (!of("layer")) return null
    const [outside, layer] = ["outside", "layer"].map((part) => evaluated(of(part), { ...sizes, context }))
    const { layers, width, vocabulary } = sizes, loss = data.loss[parameterBytes] * vocabulary
    const inLayers = checkpoints ? layers * parameterBytes * width + layer : layers * layer
    return sequences * context * (outside + inLayers + loss)
  }

  return { shapeOf, modelOf, activationsOf, keyOf }
})()
