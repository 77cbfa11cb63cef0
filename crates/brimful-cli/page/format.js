// Numbers, times, bytes and elements, as people read them.

/** A number in at most so many significant digits, without zeros that say nothing. */
function number(value, digits = 4) {
  if (value === 0 || !Number.isFinite(value)) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(decimals, 20) });
}

const TIME_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** The unit that suits times of this size: its length and its name. */
function timeUnit(value, unit) {
  if (unit === "own") return [1, ""];
  return TIME_UNITS.find(([size]) => value >= size * 0.9999) ?? TIME_UNITS[3];
}

function time(value, unit, digits = 4) {
  if (value === 0) return "0";
  const [size, name] = timeUnit(value, unit);
  return `${number(value / size, digits)} ${name}`.trim();
}

const BYTE_UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

/** Three digits, as the program itself writes them. */
function bytes(value) {
  const [size, name] = BYTE_UNITS.find(([size]) => value >= size) ?? BYTE_UNITS[4];
  const decimals = size === 1 || value / size >= 100 ? 0 : value / size >= 10 ? 1 : 2;
  return `${(value / size).toFixed(decimals)} ${name}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

const byId = (id) => document.getElementById(id);

/** A new element with attributes and children; text is text, never markup. */
function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svgElement(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A term and what it is, for a <dl>. */
function described([term, text]) {
  return [element("dt", {}, term), element("dd", {}, text)];
}
