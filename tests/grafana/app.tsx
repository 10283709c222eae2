// Draws one dashboard with Grafana's own components against a live Prometheus. Heatmaps and state timelines, whose
// panels are not published apart from Grafana, are drawn here in the same shape. The page's title holds a report.
import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  DataFrame, FieldType, Registry, ThemeContext, applyFieldOverrides, createTheme, dateTime, getFieldDisplayValues,
  getValueFormat, identityOverrideProcessor, standardEditorsRegistry, standardFieldConfigEditorRegistry,
  standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BigValue, BigValueTextMode, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

declare const window: any;
const { base, from, to, step: scrape, unit, dashboard, variables } = window.CONFIG;
const stepOf = (panel: any): number => (panel.interval === '1m' ? 60 : scrape);
const theme = createTheme({ colors: { mode: 'dark' } });
const timeRange: any = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };

const all: any = standardTransformers;
standardTransformersRegistry.setInit(() =>
  [...new Map(Object.values(all).map((t: any) => [t.id, t])).values()].map((t: any) => ({
    id: t.id, editor: () => null, transformation: async () => t, name: t.name, description: t.description,
  })) as any);
const property = (id: string, path = id, isCustom = false): any => ({
  id, path, isCustom, name: id, description: '', editor: () => null, override: () => null,
  process: identityOverrideProcessor, shouldApply: () => true, settings: {},
});
const standard = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'color', 'thresholds', 'mappings', 'links',
  'filterable', 'description'].map((id) => property(id));
standardFieldConfigEditorRegistry.setInit(() => standard);
standardEditorsRegistry.setInit(() => []);
const custom = ['drawStyle', 'lineWidth', 'fillOpacity', 'scaleDistribution', 'thresholdsStyle', 'axisPlacement', 'axisWidth',
  'showPoints', 'spanNulls', 'cellOptions', 'lineInterpolation', 'gradientMode', 'stacking', 'pointSize', 'axisLabel',
  'width', 'minWidth', 'align', 'lineStyle', 'filterable', 'axisSoftMax', 'barAlignment'].map((id) => property(`custom.${id}`, id, true));
const registry: any = new Registry(() => [...standard, ...custom]);

const filled = (text: string, step: number): string =>
  Object.entries({ ...variables, __rate_interval: '75s', __interval: `${step}s`, __range: `${(to - from) / 1000}s` })
    .reduce((done, [name, value]) => done.replaceAll(`$${name}`, value as string), text);

async function asked(target: any, step: number): Promise<DataFrame[]> {
  const when = target.instant ? `query?time=${to / 1000}` : `query_range?start=${from / 1000}&end=${to / 1000}&step=${step}`;
  const answer = await (await fetch(`${base}/api/v1/${when}&query=${encodeURIComponent(filled(target.expr, step))}`)).json();
  if (answer.status !== 'success') throw new Error(answer.error);
  const found = answer.data.result;
  if (target.format === 'table') {
    const names = [...new Set(found.flatMap((one: any) => Object.keys(one.metric)))].sort() as string[];
    return [toDataFrame({ refId: target.refId, fields: [
      { name: 'Time', type: FieldType.time, values: found.map((one: any) => one.value[0] * 1000) },
      ...names.map((name) => ({ name, type: FieldType.string, values: found.map((one: any) => one.metric[name] ?? '') })),
      { name: `Value #${target.refId}`, type: FieldType.number, values: found.map((one: any) => Number(one.value[1])) },
    ] })];
  }
  const times: number[] = [];
  for (let at = from; at <= to; at += step * 1000) times.push(at);
  return found.map((one: any) => {
    const points = new Map((one.values ?? [one.value]).map((p: any) => [Math.round(p[0] * 1000), Number(p[1])]));
    const axis = target.instant ? [...points.keys()] : times;
    const named = target.legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_: any, key: string) => one.metric[key] ?? '');
    return toDataFrame({ refId: target.refId, fields: [
      { name: 'Time', type: FieldType.time, values: axis, config: { interval: step * 1000 } },
      { name: 'Value', type: FieldType.number, labels: one.metric, values: axis.map((at) => { const v = points.get(at as number) as number; return Number.isFinite(v) ? v : null; }),
        config: { displayNameFromDS: named } },
    ] });
  });
}

const shownName = (frame: DataFrame): string => {
  const field = frame.fields[1];
  return field.config.displayName ?? field.config.displayNameFromDS ?? field.name;
};
const unitOf = (unit: string, value: number): string => {
  const made = getValueFormat(unit)(value);
  return `${made.prefix ?? ''}${made.text}${made.suffix ?? ''}`;
};

function Canvas({ width, height, draw }: any) {
  const reference = React.useRef<HTMLCanvasElement>(null);
  React.useEffect(() => {
    const context = reference.current!.getContext('2d')!;
    context.font = '11px Inter, Helvetica, Arial, sans-serif';
    draw(context);
  });
  return <canvas ref={reference} width={width} height={height} />;
}
// Milliseconds since 1970 -> pixels, right of the axis that the panel wants.
const across = (at: number, width: number, left: number) => left + ((at - from) / (to - from)) * (width - left - 8);
function axis(context: CanvasRenderingContext2D, width: number, bottom: number, left: number) {
  context.fillStyle = '#9aa0a8';
  for (let at = Math.ceil(from / 60000) * 60000; at <= to; at += Math.max(60000, (to - from) / 10)) {
    const x = across(at, width, left);
    context.textAlign = x > width - 24 ? 'right' : 'center';
    context.fillText(new Date(at).toISOString().slice(11, 16), x, bottom + 14);
  }
}

function States({ frames, width, height, left, step }: any) {
  return <Canvas width={width} height={height} draw={(context: CanvasRenderingContext2D) => {
    const rows = frames.length, high = (height - 20) / Math.max(1, rows);
    frames.forEach((frame: DataFrame, row: number) => {
      const field = frame.fields[1];
      context.fillStyle = '#c7ccd3';
      context.textAlign = 'right';
      context.fillText(shownName(frame), left - 6, row * high + high / 2 + 4);
      frame.fields[0].values.forEach((at: number, i: number) => {
        if (field.values[i] === null) return;
        context.fillStyle = field.display!(field.values[i]).color ?? '#888';
        const x = across(at, width, left), end = across(Math.min(at + step * 1000, to), width, left);
        context.fillRect(x, row * high + high * 0.08, end - x + 0.6, high * 0.84);
      });
    });
    axis(context, width, height - 20, left);
  }} />;
}

function Heat({ frames, width, height, left, unit, step }: any) {
  return <Canvas width={width} height={height} draw={(context: CanvasRenderingContext2D) => {
    const sorted = [...frames].sort((a, b) => Number(a.fields[1].labels.le.replace('+Inf', 'Infinity')) - Number(b.fields[1].labels.le.replace('+Inf', 'Infinity')));
    const counts = sorted.map((frame, i) => frame.fields[1].values.map((v: number, t: number) => Math.max(0, (v ?? 0) - (i ? sorted[i - 1].fields[1].values[t] ?? 0 : 0))));
    const used = counts.map((row) => row.some((v: number) => v > 1e-9));
    const first = Math.max(0, used.indexOf(true) - 1), last = used.lastIndexOf(true);
    const most = Math.max(...counts.flat(), 1e-9), rows = last - first + 1, high = (height - 20) / rows;
    for (let i = first; i <= last; i++) {
      const top = (last - i) * high;
      counts[i].forEach((value: number, t: number) => {
        if (value <= 1e-9) return;
        const share = (value / most) ** 0.4;
        context.fillStyle = `rgb(${120 + 135 * share}, ${60 + 150 * share}, ${20 + 130 * share})`;
        const end = sorted[i].fields[0].values[t], x = across(Math.max(end - step * 1000, from), width, left);
        context.fillRect(x, top + 0.5, across(end, width, left) - x - 1, high - 1);
      });
      const every = Math.ceil(rows / ((height - 20) / 14));
      if ((last - i) % every === 0) {
        const edge = sorted[i].fields[1].labels.le;
        context.fillStyle = '#9aa0a8';
        context.textAlign = 'right';
        context.fillText(edge === '+Inf' ? edge : unitOf(unit, Number(edge)), left - 6, top + 10);
      }
    }
    axis(context, width, height - 20, left);
  }} />;
}

function Body({ panel, data, width, height }: any) {
  const shared: any = { replaceVariables: (text: string) => text, theme, timeZone: 'utc' };
  const frames = applyFieldOverrides({ data, fieldConfig: panel.fieldConfig, fieldConfigRegistry: registry, ...shared });
  if (!frames.some((frame) => frame.length > 0)) {
    return <div style={{ textAlign: 'center', paddingTop: height / 2 - 10, fontSize: 16 }}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  const Series: any = TimeSeries, Table: any = TableNG;
  switch (panel.type) {
    case 'timeseries':
      return <Series frames={frames} structureRev={1} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={panel.options.legend} options={panel.options} />;
    case 'stat': {
      const values = getFieldDisplayValues({ fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, data: frames, sparkline: true, ...shared });
      return <div style={{ display: 'flex' }}>{values.map((value: any, i: number) =>
        <BigValue key={i} value={value.display} width={width / values.length} height={height} theme={theme} colorMode={panel.options.colorMode}
          graphMode={panel.options.graphMode} textMode={panel.options.textMode as BigValueTextMode} sparkline={panel.options.graphMode === 'area' ? value.sparkline : undefined} />)}</div>;
    }
    case 'table':
      for (const field of frames[0].fields) field.name = field.config.displayName ?? field.name;
      return <Table data={frames[0]} width={width} height={height} structureRev={1} initialSortBy={panel.options.sortBy} />;
    case 'state-timeline': return <States frames={frames} width={width} height={height} left={panel.fieldConfig.defaults.custom.axisWidth} step={stepOf(panel)} />;
    case 'heatmap': return <Heat frames={frames} width={width} height={height} left={panel.options.yAxis.axisWidth} unit={panel.options.yAxis.unit} step={stepOf(panel)} />;
    default: return <div>unknown panel {panel.type}</div>;
  }
}

class Caught extends React.Component<any, any> {
  state: any = {};
  static getDerivedStateFromError(error: any) { return { error }; }
  render() { return this.state.error ? <pre style={{ color: 'red' }}>{String(this.state.error.stack)}</pre> : this.props.children; }
}

(async () => {
  const drawn: any[] = [], report: any[] = [], cell = 1600 / 24;
  for (const panel of dashboard.panels) {
    const { x, y, w, h } = panel.gridPos;
    const place: any = { position: 'absolute', left: x * cell, top: y * unit, width: w * cell - 8, height: h * unit - 8 };
    if (panel.type === 'row') {
      drawn.push(<div key={panel.id} style={{ ...place, color: '#ccc', fontSize: 14, paddingTop: 6 }}>{panel.title}</div>);
      continue;
    }
    let data: DataFrame[] = [], error: any;
    try {
      for (const target of panel.targets) data.push(...(await asked(target, stepOf(panel))));
      if (panel.transformations) data = await new Promise((done) => transformDataFrame(panel.transformations, data).subscribe(done));
    } catch (caught) { error = caught; }
    report.push({ title: panel.title, frames: data.length, error: error && String(error) });
    drawn.push(<div key={panel.id} style={place}><Caught>
      <PanelChrome title={panel.title} description={panel.description} width={w * cell - 8} height={h * unit - 8} padding="sm">
        {(width: number, height: number) => error ? <div style={{ color: 'red' }}>{String(error)}</div> : <Body panel={panel} data={data} width={width} height={height} />}
      </PanelChrome></Caught></div>);
  }
  createRoot(document.getElementById('root')!).render(<ThemeContext.Provider value={theme}><GlobalStyles />{drawn}</ThemeContext.Provider>);
  document.title = JSON.stringify(report);
})();
