// Which page of a run an address means.

import { runPage } from "./run.js";
import { groupPage, stepPage } from "./step.js";
import { tokenPage } from "./tokens.js";

export function pageOfRun([run, ...rest]) {
  const [, step, , group, , sample, , token] = rest;
  if (sample !== undefined) return tokenPage(run, Number(step), Number(group), Number(sample), token);
  if (group !== undefined) return groupPage(run, Number(step), Number(group));
  return step !== undefined ? stepPage(run, Number(step)) : runPage(run);
}
