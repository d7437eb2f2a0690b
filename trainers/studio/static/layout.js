// Where the nodes of a tree stand: a tidy tree from left to right, one row a leaf.

import { hierarchy, tree as tidy } from "/static/vendor/vendor.js";

export const DENSITY = {
  roomy: { width: 224, height: 56, column: 276, row: 68 },
  compact: { width: 212, height: 24, column: 258, row: 30 },
};
/** Up to so many leaves cards have three lines, beyond it one. */
const ROOMY_LEAVES = 14;

export const autoDensity = (nodes) => (nodes.filter((node) => node.status !== "open").length > ROOMY_LEAVES ? "compact" : "roomy");

/** Children, number of leaves and mean reward below each node, once a tree. */
export function indexTree(nodes) {
  const byId = new Map();
  for (const node of nodes) byId.set(node.id, { ...node, children: [], leaves: 0, scored: 0, sum: 0, mean: null, depth: 0 });
  // Nodes come breadth first: parents before children.
  for (const node of byId.values()) {
    const parent = byId.get(node.parent);
    if (parent) {
      parent.children.push(node);
      node.depth = parent.depth + 1;
    }
  }
  for (const node of [...byId.values()].reverse()) {
    if (node.status !== "open") {
      node.leaves = 1;
      if (node.reward !== null && node.status !== "failed" && !node.pruned) {
        node.scored = 1;
        node.sum = node.reward;
      }
    }
    node.mean = node.scored ? node.sum / node.scored : null;
    const parent = byId.get(node.parent);
    if (parent) {
      parent.leaves += node.leaves;
      parent.scored += node.scored;
      parent.sum += node.sum;
    }
  }
  return byId;
}

/** {boxes: [{node, x, y, hidden}], width, height}; x and y are the left and the middle of a card. */
export function layOut(byId, collapsed, size) {
  const root = byId.get("root");
  const shown = hierarchy(root, (node) => (collapsed.has(node.id) ? [] : node.children));
  tidy().nodeSize([size.row, size.column]).separation((a, b) => (a.parent === b.parent ? 1 : 1.25))(shown);
  let top = Infinity;
  let bottom = -Infinity;
  let right = 0;
  const boxes = [];
  shown.each((item) => {
    top = Math.min(top, item.x);
    bottom = Math.max(bottom, item.x);
    right = Math.max(right, item.y);
    const hidden = collapsed.has(item.data.id) && item.data.children.length ? item.data.leaves : 0;
    boxes.push({ node: item.data, x: item.y, y: item.x, hidden });
  });
  for (const box of boxes) box.y -= top;
  return { boxes, places: new Map(boxes.map((box) => [box.node.id, box])), width: right + size.width, height: bottom - top + size.height };
}

/** The ids from the root to a node. */
export function pathTo(byId, id) {
  const ids = new Set();
  for (let node = byId.get(id); node; node = byId.get(node.parent)) ids.add(node.id);
  return ids;
}

/** The node that an arrow key leads to; up and down go through the cards of a column, across branches. */
export function neighbour(layout, byId, id, key) {
  const node = byId.get(id);
  const here = layout.places.get(id);
  if (!node || !here) return "root";
  if (key === "ArrowLeft") return node.parent ?? id;
  if (key === "ArrowRight") {
    const open = node.children.filter((child) => layout.places.has(child.id));
    return open.length ? open.reduce((a, b) => (off(layout, b, here) < off(layout, a, here) ? b : a)).id : id;
  }
  const sign = key === "ArrowUp" ? -1 : 1;
  let best = null;
  for (const box of layout.boxes) {
    const gap = (box.y - here.y) * sign;
    if (box.x === here.x && gap > 0 && (best === null || gap < (best.y - here.y) * sign)) best = box;
  }
  return best ? best.node.id : id;
}

const off = (layout, node, here) => Math.abs(layout.places.get(node.id).y - here.y);

let pen = null;

/** As much of a text as a width holds, in the letters that cards are drawn with. */
export function clip(text, width, fontSize) {
  if (!pen) {
    pen = document.createElement("canvas").getContext("2d");
    pen.font = `${fontSize}px ${getComputedStyle(document.documentElement).getPropertyValue("--sans")}`;
  }
  const fits = (length) => pen.measureText(length < text.length ? `${text.slice(0, length).trimEnd()}…` : text).width <= width;
  if (text.length * fontSize < 0.2 * width || (text.length < LONG && fits(text.length))) return text;
  let [low, high] = [0, Math.min(text.length, LONG)];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  const half = /[\ud800-\udbff]$/.test(text.slice(0, low)) ? 1 : 0; // of a pair
  return `${text.slice(0, low - half).trimEnd()}…`;
}

/** More letters than any card holds. */
const LONG = 120;
