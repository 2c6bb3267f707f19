// The page's words in both languages.
const WORDS = {
  en: {
    other: "中文", runs: "Runs", curves: "Curves", axis: "over", step: "step", tokens: "tokens", time: "time in steps",
    samplesUnit: "samples", logX: "logarithmic", smooth: "smoothing", median: "median", medianOf: "median of {n} steps", reset: "whole run", pause: "pause", none: "off",
    help: "Drag over a picture to zoom, double-click to see the whole run. Keys: arrows read values, + and - zoom, 0 " +
      "resets, L changes to a logarithmic scale.",
    scores: "Evaluation scores", samples: "Samples", run: "run", different: "Settings that differ", attempts: "Attempts",
    light: "light", dark: "dark", auto: "system", theme: "colours", connected: "live", lost: "no connection; trying again",
    waiting: "waiting for its first row", reading: "reading", empty: "no attempt yet", running: "running",
    silent: "no new row; killed?", ended: "ended", failed: "failed", name: "run", state: "state", loss: "loss",
    training: "training", validation: "validation", best: "best", speed: "tokens/s", memory: "memory", mfu: "MFU", left: "left",
    elapsed: "in steps", goodput: "goodput", recovery: "to recover", amount: "seen", of: "of", log: "log", paused: "paused", noPrompt: "(start of a document)",
    started: "started", iterations: "steps", command: "command", end: "end", nothing: "no step yet", problem: "cannot read",
    damaged: "a line that is no row", skipped: "skipped steps", equal: "none",
    titles: { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", tokens_per_second: "Speed", ms: "Step time",
      mfu: "MFU", memory: "Peak memory" },
    units: { bits: "about bits per byte, as the vocabularies differ",
      mixed: "per token, not comparable: the vocabularies differ", grad_norm: "before clipping", tokens_per_second: "tokens per second", ms: "milliseconds", memory: "GiB",
      mfu: "share of the peak" },
  },
  zh: {
    other: "English", runs: "训练", curves: "曲线", axis: "横轴", step: "步数", tokens: "词元数", time: "训练步用时",
    samplesUnit: "样本数", logX: "对数", smooth: "平滑", median: "中位数", medianOf: "{n} 步的中位数", reset: "全程", pause: "暂停", none: "关",
    help: "在图上拖动可放大，双击恢复全程。按键：方向键读数，+ 和 - 缩放，0 恢复，L 切换对数坐标。",
    scores: "评测得分", samples: "生成样例", run: "训练", different: "不同的设置", attempts: "历次启动",
    light: "浅色", dark: "深色", auto: "跟随系统", theme: "配色", connected: "实时", lost: "连接中断，正在重试",
    waiting: "等待第一行数据", reading: "正在读取", empty: "尚未启动", running: "运行中",
    silent: "没有新数据，可能已被终止", ended: "已结束", failed: "失败", name: "训练", state: "状态", loss: "损失",
    training: "训练", validation: "验证", best: "最佳", speed: "词元/秒", memory: "显存", mfu: "MFU", left: "剩余",
    elapsed: "步用时", goodput: "有效时间", recovery: "恢复用时", amount: "已用数据", of: "/", log: "对数", paused: "已暂停", noPrompt: "（文档开头）",
    started: "启动时间", iterations: "步数", command: "命令", end: "结束", nothing: "还没有训练步", problem: "无法读取",
    damaged: "有一行不是有效数据", skipped: "跳过的步", equal: "无",
    titles: { loss: "损失", lr: "学习率", grad_norm: "梯度范数", tokens_per_second: "速度", ms: "每步用时", mfu: "MFU",
      memory: "显存峰值" },
    units: { bits: "约为每字节比特数（词表不同）", mixed: "按词元计，不可比较（词表不同）", grad_norm: "裁剪之前", tokens_per_second: "词元/秒", ms: "毫秒", memory: "GiB", mfu: "占峰值的比例" },
  },
};

let language = "en";

export function setLanguage(name) {
  language = name in WORDS ? name : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}
export const currentLanguage = () => language;
export const word = (key) => WORDS[language][key] ?? key;
export const entry = (table, key) => WORDS[language][table][key] ?? "";

// Numbers as people read them.
const forms = new Map();
function form(options) {
  const key = language + JSON.stringify(options);
  if (!forms.has(key)) forms.set(key, new Intl.NumberFormat(language === "zh" ? "zh-CN" : "en", options));
  return forms.get(key);
}
export const whole = (n) => (n == null ? "" : form({ maximumFractionDigits: 0 }).format(n));
export function compact(n) {
  if (n == null) return "";
  const [size, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([s]) => Math.abs(n) >= s) ?? [1, ""];
  return form({ maximumSignificantDigits: 4 }).format(n / size) + letter;
}
export function figure(n) {
  if (n == null) return "";
  const size = Math.abs(n);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return n.toExponential(3).replace(/\.?0*e\+?/, "e");
  return form({ maximumSignificantDigits: size >= 1 ? 5 : 4 }).format(n);
}
export function clock(seconds) {
  if (seconds == null) return "";
  const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${two(minutes)}:${two(s % 60)}` : `${minutes}:${two(s % 60)}`;
}
export const date = (seconds) =>
  seconds ? new Date(1000 * seconds).toLocaleString(language === "zh" ? "zh-CN" : "en-GB") : "";
