// The lab alone, with stored answers.

import { lab } from "./lab.js";
import { start } from "./site.js";

start((parts) => lab(parts[0] === "lab" ? parts.slice(1) : []), { lab: "Lab" });
