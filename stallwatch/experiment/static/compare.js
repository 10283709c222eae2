// Experiments side by side: what differs in what was measured, the gaps over each other, each measure with its effect.

import { data, element, table } from "./dom.js";
import { UNKNOWN, figure } from "./figures.js";
import { Stack } from "./chart.js";
import { ARMS, ARM_WORDS, VERDICTS, estimateCell, section, told } from "./parts.js";

const { report: found, letters, shown } = data();
const page = document.getElementById("main");

page.replaceChildren(
  element("header", {}, [
    element("p", { class: "soft", text: "stallwatch compare" }),
    element("h1", { text: `${found.reports.length} experiments` }),
  ]),
  section(null, [
    table(["", "report", "began", "verdict"], found.reports.map((one, place) => [
      letters[place], one.name, one.began, one.verdicts.map((verdict) => VERDICTS[verdict] ?? verdict).join(", "),
    ])),
  ]),
  section("What differs in what was measured", [
    found.differs.length
      ? table(["", ...letters], found.differs.map((row) => [row.fact, ...row.values.map((value) => value ?? UNKNOWN)]))
      : element("p", { text: "Nothing that is known." }),
    told("Mind", found.cautions),
  ], { wide: true }),
);

// --- gaps over each other: how long the rare ones are

const drawn = ARMS.filter((arm) => found.gaps.filter((gaps) => gaps[arm]).length > 0);
if (drawn.length) {
  const holder = element("div");
  page.append(section("Gaps, by how rare they are", [
    element("p", { class: "soft", text: "At 1 one gap in ten is longer, at 2 one in a hundred, at 3 one in a thousand." }),
    holder,
  ]));
  const xs = Array.from({ length: 121 }, (_, place) => place / 30);
  const most = Math.max(...found.gaps.flatMap((gaps) => Object.values(gaps).map((one) => -Math.log10(one.share[0]))));
  const range = [0, Math.min(4, Math.max(1, most))];
  const chart = new Stack(holder, {
    axis: "number", lane: false, label: "Gaps by rarity", onRange: (from, to) => (from === null ? chart.setRange(...range) : chart.setRange(from, to)),
    panels: drawn.map((arm) => ({
      title: ARM_WORDS[arm], unit: "seconds", log: true, least: 0.001, most: 1, height: 130,
      series: found.reports.slice(0, 4).map((one, place) => ({
        column: `${arm}-${place}`, label: letters[place], shade: place + 1, bridge: 1e9, optional: true,
      })),
    })),
  });
  const columns = {};
  found.gaps.slice(0, 4).forEach((gaps, place) => {
    for (const arm of drawn) if (gaps[arm]) columns[`${arm}-${place}`] = xs.map((x) => at(gaps[arm], 10 ** -x));
  });
  chart.range = range;
  chart.setData(xs, columns);
  if (found.reports.length > 4) holder.append(element("p", { class: "soft", text: "Drawn are the first four." }));
}

/** The gap that a share of all gaps exceed; null beyond the rarest one. */
function at(gaps, share) {
  if (share < gaps.share[0]) return null;
  const place = gaps.share.findIndex((one) => one >= share);
  return gaps.seconds[place === -1 ? gaps.seconds.length - 1 : place];
}

// --- effects

const kinds = [...new Map(found.effects.map((row) => [`${row.arm} ${row.prompt_tokens}`, row])).values()];
for (const { arm, prompt_tokens: tokens } of kinds) {
  const rows = found.effects.filter((row) => row.arm === arm && row.prompt_tokens === tokens && shown.includes(row.measure));
  const numeric = Array.from({ length: 2 * letters.length - 1 }, (_, place) => place + 1);
  page.append(section(tokens === null ? "Streams alone" : `Beside ${figure("tokens", tokens)}, ${arm}`, [
    table(["", ...letters, ...letters.slice(1).map((letter) => `${letter} less A (95 % interval)`)], rows.map((row) => {
      const { words, unit } = found.measures[row.measure];
      return [
        words,
        ...row.means.map((one) => figure(unit, one?.mean ?? null)),
        ...row.more_than_first.slice(1).map((one, place) =>
          estimateCell(unit, one, { strong: row.apart[place + 1] })),
      ];
    }), { numeric }),
  ], { wide: true }));
}
page.append(element("p", { class: "soft", text: "Bold: the interval does not hold zero." }));
