// A tree as a file: SVG and PNG drawn from the picture, JSON and HTML from the server.

import { DENSITY } from "/static/layout.js";

const MARGIN = 24;
const HEAD = 54;
const MOST_PIXELS = 8192;
const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "font-style"];

export function fileName(tree, ending) {
  return `tree-step${tree.step}-${tree.summary.index}.${ending}`;
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A document of its own, with the colours of now written into it: it needs no style sheet and holds no script. */
export function toSvg(tools, tree, density) {
  const source = tools.frame.current.querySelector("svg.canvas");
  tools.frame.current.classList.add("still");
  const far = tools.frame.current.classList.contains("far");
  tools.frame.current.classList.remove("far");
  try {
    return draw(source, tools.layout, tree, DENSITY[density]);
  } finally {
    tools.frame.current.classList.toggle("far", far);
    tools.frame.current.classList.remove("still");
  }
}

function draw(source, layout, tree, size) {
  const width = Math.ceil(layout.width + 2 * MARGIN + 90);
  const height = Math.ceil(layout.height + 2 * MARGIN + HEAD);
  const page = make("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  const style = getComputedStyle(document.body);
  page.append(make("rect", { width, height, fill: style.backgroundColor }));
  const font = { "font-family": style.fontFamily, fill: style.color };
  page.append(make("text", { x: MARGIN, y: 34, "font-size": 16, "font-weight": 650, ...font }, tree.summary.question.slice(0, 160)));
  page.append(make("text", { x: MARGIN, y: 54, "font-size": 12, opacity: 0.7, ...font }, `step ${tree.step}, tree ${tree.summary.index}`));
  const body = inlined(source.querySelector("g.view"));
  body.setAttribute("transform", `translate(${MARGIN},${MARGIN + HEAD + size.height / 2})`);
  page.append(body);
  return new XMLSerializer().serializeToString(page);
}

function make(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = clean(text);
  return element;
}

/** XML has no place for most control characters. */
const clean = (text) => text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");

function inlined(element) {
  const style = getComputedStyle(element);
  if (style.display === "none") return document.createDocumentFragment();
  const copy = element.cloneNode(false);
  for (const name of [...copy.getAttributeNames()]) if (/^(class|id|role|tabindex|aria-|data-)/.test(name)) copy.removeAttribute(name);
  for (const name of KEPT) {
    const value = style.getPropertyValue(name);
    if (value && value !== "none" || name === "fill" || name === "stroke") copy.setAttribute(name, value);
  }
  for (const child of element.childNodes) {
    copy.append(child.nodeType === Node.TEXT_NODE ? document.createTextNode(clean(child.data)) : inlined(child));
  }
  return copy;
}

export async function toPng(svg) {
  const picture = new Image();
  const url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    await new Promise((resolve, reject) => {
      picture.onload = resolve;
      picture.onerror = () => reject(new Error("the browser could not draw the picture"));
      picture.src = url;
    });
    const scale = Math.min(2, MOST_PIXELS / Math.max(picture.naturalWidth, picture.naturalHeight));
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(picture.naturalWidth * scale);
    canvas.height = Math.round(picture.naturalHeight * scale);
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error("the picture is too large for this browser; export SVG");
    return blob;
  } finally {
    URL.revokeObjectURL(url);
  }
}
