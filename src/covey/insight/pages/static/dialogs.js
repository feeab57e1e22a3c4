// Questions over the page.

import { h } from "./dom.js";

// Resolves to whether its action was chosen. `danger`: the other answer has the focus.
export function asked(title, action, body, danger = false) {
  return new Promise((resolve) => {
    const close = (answer) => () => box.close(answer);
    const yes = h("button", { type: "button", class: danger ? "danger" : "primary", onclick: close("yes") }, action);
    const no = h("button", { type: "button", autofocus: danger, onclick: close("") }, "Cancel");
    const box = h("dialog", { "aria-label": title, onclose: () => { box.remove(); resolve(box.returnValue === "yes"); } }, h("h2", {}, title), body, h("p", { class: "choices" }, yes, no));
    box.addEventListener("keydown", (e) => {
      if (e.key !== "Enter" || !e.target.matches("input")) return;
      e.preventDefault(); // the focus goes back to the button behind the dialog, which the key would press again
      box.close("yes");
    });
    document.body.append(box);
    box.showModal();
  });
}
