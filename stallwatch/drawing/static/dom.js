// Elements made by hand. Text is only ever set as text: what the watched server says of itself is never markup.

/** An element: `properties` are `class`, `text`, `title`, `on` (event -> function), or attributes by their name. */
export function element(tag, properties = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets an element's text; does nothing when it says so already, so that nothing is laid out anew. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** What a page in one file carries. */
export function data() {
  return JSON.parse(document.getElementById("data").textContent);
}

/** A table of rows of texts; `head` names the columns, those in `numeric` are set right. */
export function table(head, rows, { numeric = [], caption = null } = {}) {
  const side = (column) => (numeric.includes(column) ? "number" : null);
  return element("div", { class: "scroll" }, [
    element("table", {}, [
      caption === null ? null : element("caption", { text: caption }),
      element("thead", {}, [
        element("tr", {}, head.map((text, column) => element("th", { scope: "col", text, class: side(column) }))),
      ]),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell, column) =>
        cell instanceof Node ? element("td", { class: side(column) }, [cell])
          : element("td", { text: cell, class: side(column) }),
      )))),
    ]),
  ]);
}
