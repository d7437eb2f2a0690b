// A tree as a picture: cards and branches, pan and zoom, collapsing, an overview in the corner.

import { html, select, useEffect, useLayoutEffect, useMemo, useRef, useState, zoom, zoomIdentity } from "/static/vendor/vendor.js";
import { gist, kindName, num, outcome, plural, sign, useLatest, verdictText } from "/static/base.js";
import { nodeScale } from "/static/colour.js";
import { DENSITY, autoDensity, clip, indexTree, layOut, neighbour, pathTo } from "/static/layout.js";

const MARGIN = 28;
/** A first look is never smaller than this: beyond it one pans, and the overview shows the rest. */
const READABLE = 0.8;
const FAR = 0.5;

/** The picture of `tree`. `tools` (a ref) gets {fit, zoomBy, collapse, element, layout}. */
export function Picture({ tree, node, colour, density, onSelect, tools, label }) {
  const byId = useMemo(() => indexTree(tree.nodes), [tree]);
  const [collapsed, setCollapsed] = useState(new Set());
  useLayoutEffect(() => setCollapsed(new Set()), [tree.step, tree.summary.index]);
  const dense = density === "auto" ? autoDensity(tree.nodes) : density;
  const size = DENSITY[dense];
  const layout = useMemo(() => layOut(byId, collapsed, size), [byId, collapsed, size]);
  const scale = useMemo(() => nodeScale([...byId.values()], colour), [byId, colour]);
  const path = useMemo(() => pathTo(byId, node), [byId, node]);
  const frame = useRef(null);
  const see = () => layout.places.has(node) && view.reveal(layout.places.get(node));
  const view = useView(frame, layout, size, `${tree.step}/${tree.summary.index}/${dense}`, see);

  const toggle = (id) => setCollapsed((old) => {
    const next = new Set(old);
    if (!next.delete(id)) next.add(id);
    return next;
  });
  const everything = (close) => setCollapsed(close
    ? new Set([...byId.values()].filter((item) => item.depth === 1 && item.children.length).map((item) => item.id))
    : new Set());
  // What is selected from outside (a link, a search) must be seen: branches above it open, the view moves there.
  useEffect(() => {
    const hiding = [...path].filter((id) => id !== node && collapsed.has(id));
    if (hiding.length) setCollapsed((old) => new Set([...old].filter((id) => !hiding.includes(id))));
    else see();
  }, [node, layout]);
  if (tools) tools.current = { ...view, toggle, everything, frame, layout, scale };

  const latest = useLatest({ layout, byId, node, onSelect, toggle });
  const onKey = (event) => {
    const now = latest.current;
    if (event.key.startsWith("Arrow") && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      now.onSelect(neighbour(now.layout, now.byId, now.node || "root", event.key));
    } else if ((event.key === " " || event.key === "Enter") && now.node) {
      event.preventDefault();
      if (now.byId.get(now.node)?.children.length) now.toggle(now.node);
    }
  };
  return html`<div class="picture" ref=${frame} tabindex="0" role="tree" aria-label=${label} onKeyDown=${onKey}
      aria-activedescendant=${node ? cardId(label, node) : undefined}>
    <svg class=${`canvas ${dense}`} aria-hidden="false">
      <g class="view">
        <${Branches} layout=${layout} size=${size} path=${path} />
        ${layout.boxes.map((box) => html`<${Card} key=${box.node.id} box=${box} size=${size} dense=${dense}
          look=${scale.of(box.node)} selected=${box.node.id === node} onPath=${path.has(box.node.id)}
          id=${cardId(label, box.node.id)} act=${latest} />`)}
      </g>
    </svg>
    <${Overview} layout=${layout} size=${size} view=${view} />
  </div>`;
}

const cardId = (label, id) => `card-${label.replace(/\W+/g, "-")}-${id}`;

// Pan and zoom --------------------------------------------------------------------------------------------------------

/** The room of the last picture: a new one begins with it, so that it is laid out once, at its final scale. */
let lastRoom = null;

function useView(frame, layout, size, key, onResize) {
  // `fitted` until somebody pans or zooms: such a view fits itself again when the room for it changes.
  const state = useRef({ transform: zoomIdentity, listeners: new Set(), fitted: true, moving: false, room: null });
  const behaviour = useRef(null);
  const latest = useLatest({ layout, size, onResize });
  // Kept, since asking the page for it in the middle of drawing makes it lay everything out.
  const room = () => (state.current.room ??= lastRoom ?? { width: frame.current.clientWidth, height: frame.current.clientHeight });

  useLayoutEffect(() => {
    const svg = select(frame.current.querySelector("svg"));
    const inner = frame.current.querySelector("g.view");
    behaviour.current = zoom()
      .scaleExtent([0.08, 3])
      .extent(() => [[0, 0], [room().width, room().height]])
      // A wheel pans, as in a document; with Ctrl (or a pinch) it zooms.
      .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button))
      .on("zoom", ({ transform }) => {
        state.current.transform = transform;
        if (!state.current.moving) state.current.fitted = false;
        inner.setAttribute("transform", transform);
        frame.current.classList.toggle("far", transform.k < FAR);
        for (const listener of state.current.listeners) listener(transform);
      });
    svg.call(behaviour.current).on("dblclick.zoom", null);
    const pan = (event) => {
      if (event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const { k } = state.current.transform;
      const [dx, dy] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      svg.call(behaviour.current.translateBy, -dx / k, -dy / k);
    };
    svg.node().addEventListener("wheel", pan, { passive: false });
    const watch = new ResizeObserver(([entry]) => {
      const { width, height } = entry.contentRect;
      const known = room();
      lastRoom = state.current.room = { width, height };
      if (known.width === width && known.height === height) return;
      if (state.current.fitted) fit(READABLE);
      latest.current.onResize();
    });
    watch.observe(frame.current);
    return () => {
      watch.disconnect();
      svg.node()?.removeEventListener("wheel", pan);
    };
  }, []);

  const set = (transform) => {
    state.current.moving = true;
    select(frame.current.querySelector("svg")).call(behaviour.current.transform, transform);
    state.current.moving = false;
  };
  const fit = (least = 0) => {
    const { layout: now, size: card } = latest.current;
    const space = room();
    if (!space.width || !space.height) return;
    const whole = Math.min((space.width - 2 * MARGIN) / now.width, (space.height - 2 * MARGIN) / now.height);
    const k = Math.min(1.15, Math.max(whole, least));
    const root = now.places.get("root");
    const tall = now.height * k > space.height;
    const wide = now.width * k > space.width;
    const x = wide ? MARGIN : (space.width - now.width * k) / 2;
    // The middle of the first card of a tree that is too tall, else the middle of the tree.
    const y = tall ? space.height / 2 - root.y * k : (space.height - now.height * k) / 2 + (card.height / 2) * k;
    state.current.fitted = least > 0;
    set(zoomIdentity.translate(x, y).scale(k));
  };
  const zoomBy = (factor) => select(frame.current.querySelector("svg")).call(behaviour.current.scaleBy, factor);
  const reveal = (box) => {
    const { k, x, y } = state.current.transform;
    const { size: card } = latest.current;
    const space = room();
    const left = box.x * k + x;
    const top = (box.y - card.height / 2) * k + y;
    const move = (start, length, limit) => (start < MARGIN ? MARGIN - start : Math.min(0, limit - MARGIN - start - length));
    const [dx, dy] = [move(left, card.width * k, space.width), move(top, card.height * k, space.height)];
    if (dx || dy) set(zoomIdentity.translate(x + dx, y + dy).scale(k));
  };
  const centre = (px, py) => {
    const { k } = state.current.transform;
    const space = room();
    set(zoomIdentity.translate(space.width / 2 - px * k, space.height / 2 - py * k).scale(k));
  };
  const listen = (listener) => {
    state.current.listeners.add(listener);
    return () => state.current.listeners.delete(listener);
  };
  useLayoutEffect(() => fit(READABLE), [key]);
  return { fit, zoomBy, reveal, centre, listen, room, transform: () => state.current.transform };
}

// Cards and branches --------------------------------------------------------------------------------------------------

function Branches({ layout, size, path }) {
  return html`<g class="branches">${layout.boxes.filter((box) => box.node.parent !== null).map((box) => {
    const parent = layout.places.get(box.node.parent);
    const [x0, x1] = [parent.x + size.width, box.x];
    const middle = (x0 + x1) / 2;
    return html`<${Branch} key=${box.node.id} on=${path.has(box.node.id)}
      d=${`M${x0},${parent.y}C${middle},${parent.y} ${middle},${box.y} ${x1},${box.y}`} />`;
  })}</g>`;
}

const Branch = ({ on, d }) => useMemo(() => html`<path class=${on ? "on" : ""} d=${d} />`, [on, d]);

function Card({ box, size, dense, look, selected, onPath, id, act }) {
  const { node } = box;
  const how = outcome(node);
  const root = node.parent === null;
  const classes = ["card", look, how ?? "", node.status, root ? "root" : "", selected ? "selected" : "", onPath ? "on" : "",
    node.pruned ? "pruned" : ""].filter(Boolean).join(" ");
  const name = root ? "prompt" : kindName(node.kind);
  const right = verdictText(node);
  const label = `${node.id}, ${name}${right ? `, ${right}` : ""}: ${gist(node).slice(0, 120)}`;
  // The same answer draws nothing: of a large tree, a step from card to card changes a few.
  return useMemo(() => html`<g class=${classes} id=${id} role="treeitem" aria-label=${label} aria-selected=${selected} aria-level=${node.depth + 1}
      aria-expanded=${node.children.length ? !box.hidden : undefined} data-node=${node.id}
      transform=${`translate(${box.x},${box.y - size.height / 2})`}
      onClick=${() => act.current.onSelect(node.id)} onDblClick=${() => node.children.length && act.current.toggle(node.id)}>
    <title>${label}</title>
    <rect class="face" width=${size.width} height=${size.height} rx="7" />
    <path class="accent" d=${`M7,0h-1a6,6 0 0 0 -6,6v${size.height - 12}a6,6 0 0 0 6,6h1z`} />
    ${dense === "roomy" ? html`<${Roomy} node=${node} size=${size} name=${name} right=${right} how=${how} />`
      : html`<${Compact} node=${node} size=${size} right=${right} how=${how} />`}
    ${node.children.length > 0 && html`<${Handle} box=${box} size=${size} act=${act} />`}
  </g>`, [box, size, dense, classes, id]);
}

function Roomy({ node, size, name, right, how }) {
  const line = clip(gist(node), size.width - 26, 12);
  const measures = node.parent === null ? plural(node.leaves, "leaf", "leaves")
    : `${node.advantage === null ? "" : `A ${num(node.advantage, { plus: true })}   `}H ${num(node.entropy)}`;
  return html`<path class="sign" d=${sign(node)} transform="translate(14,8)" /><text class="name" x="32" y="18">${name}</text>
    <text class=${`verdict ${how ?? ""}`} x=${size.width - 10} y="18" text-anchor="end">${right}</text>
    <text class="gist" x="15" y="34">${line}</text>
    <text class="fine" x="15" y="49">${measures}</text>
    <text class="fine" x=${size.width - 10} y="49" text-anchor="end">${node.parent === null ? "" : `${node.tokens} tok`}</text>`;
}

function Compact({ node, size, right, how }) {
  const room = size.width - 42 - (right ? right.length * 7 + 12 : node.children.length * 6 && 6);
  return html`<path class="sign" d=${sign(node)} transform="translate(13,6)" />
    <text class="gist" x="31" y="16">${clip(gist(node), room, 12)}</text>
    <text class=${`verdict ${how ?? ""}`} x=${size.width - 8} y="16" text-anchor="end">${right}</text>`;
}

/** The knob where branches leave a card: it closes and opens what is below. */
function Handle({ box, size, act }) {
  const { node, hidden } = box;
  const flip = (event) => {
    event.stopPropagation();
    act.current.toggle(node.id);
  };
  const text = hidden ? `+${plural(hidden, "leaf", "leaves")}${node.mean === null ? "" : ` · ${num(node.mean)}`}` : "";
  return html`<g class=${`handle ${hidden ? "closed" : ""}`} transform=${`translate(${size.width},${size.height / 2})`} onClick=${flip}>
    ${hidden ? html`<rect x="-1" y="-10" width=${text.length * 6.4 + 16} height="20" rx="10" /><text x="8" y="4">${text}</text>`
      : html`<circle r="9" class="reach" /><circle r="4.5" />`}
  </g>`;
}

// The overview --------------------------------------------------------------------------------------------------------

const MAP = { width: 168, height: 112, margin: 6 };

function Overview({ layout, size, view }) {
  const rect = useRef(null);
  const map = useRef(null);
  const k = Math.min((MAP.width - 2 * MAP.margin) / layout.width, (MAP.height - 2 * MAP.margin) / layout.height);
  const height = layout.height * k + 2 * MAP.margin;
  const width = layout.width * k + 2 * MAP.margin;
  const draw = () => {
    const space = view.room();
    const t = view.transform();
    const left = -t.x / t.k;
    const top = -t.y / t.k + size.height / 2;
    const seen = { x: left * k + MAP.margin, y: top * k + MAP.margin, width: (space.width / t.k) * k, height: (space.height / t.k) * k };
    for (const [name, value] of Object.entries(seen)) rect.current?.setAttribute(name, value);
    const slack = MAP.margin + 1;
    const all = seen.x <= slack && seen.y <= slack && seen.width + seen.x >= width - slack && seen.height + seen.y >= height - slack;
    map.current?.classList.toggle("idle", all);
  };
  useEffect(() => {
    draw();
    return view.listen(draw);
  }, [layout, size]);
  const jump = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    event.preventDefault();
    const area = map.current.getBoundingClientRect();
    view.centre((event.clientX - area.left - MAP.margin) / k, (event.clientY - area.top - MAP.margin) / k - size.height / 2);
  };
  return html`<svg class="overview" ref=${map} width=${width} height=${height} aria-hidden="true" onPointerDown=${jump} onPointerMove=${jump}>
    ${useMemo(() => layout.boxes.map((box) => html`<rect key=${box.node.id} class=${`dot ${outcome(box.node) ?? "open"}`} x=${box.x * k + MAP.margin}
      y=${box.y * k + MAP.margin} width=${Math.max(2, size.width * k)} height=${Math.max(1, size.height * k * 0.8)} />`), [layout, size])}
    <rect class="seen" ref=${rect} rx="2" />
  </svg>`;
}
