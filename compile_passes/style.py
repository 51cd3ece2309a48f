"""The style sheet of the report's pages, all of it under one class, so that it can stand in a notebook."""

STYLE = """
.moe-ops{--paper:#fff;--ink:#1d2430;--soft:#5b6675;--line:#d9dee6;--box:#f6f8fa;--good:#0b7a53;--goodbox:#e7f6ef;
--bad:#b3261e;--badbox:#fdecea;--router:#7c4dcc;--topk:#b0579b;--dispatch:#2f6fdb;--experts:#c26a00;
--combine:#0f8a8a;--outside:#b3261e;color:var(--ink);background:var(--paper);font:14px/1.45 system-ui,sans-serif}
@media (prefers-color-scheme:dark){.moe-ops{--paper:#14181f;--ink:#e6eaf0;--soft:#9aa6b5;--line:#323a47;--box:#1c222c;
--good:#4cc38a;--goodbox:#12291f;--bad:#ff8a80;--badbox:#341a1a;--router:#b794f6;--topk:#e39ad1;--dispatch:#7fb0ff;
--experts:#f0a64b;--combine:#4fd1c5;--outside:#ff8a80}}
.moe-ops *{box-sizing:border-box}
.moe-ops code,.moe-ops .mono{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
overflow-wrap:anywhere;white-space:pre-wrap}
.moe-ops code{background:none;color:inherit;padding:0}
.moe-ops h1{font-size:22px;margin:0 0 4px}.moe-ops h2{font-size:16px;margin:28px 0 8px}
.moe-ops p{margin:4px 0;overflow-wrap:anywhere}.moe-ops .soft{color:var(--soft)}.moe-ops .small{font-size:12px}
.moe-ops .chips{display:flex;flex-wrap:wrap;gap:6px;margin:8px 0}
.moe-ops .chip{border:1px solid var(--line);border-radius:999px;padding:1px 10px;font-size:12.5px;background:var(--box)}
.moe-ops .chip b{font-weight:600}
.moe-ops .chip.good{color:var(--good);background:var(--goodbox);border-color:var(--good)}
.moe-ops .chip.bad{color:var(--bad);background:var(--badbox);border-color:var(--bad)}
.moe-ops .card{border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:16px 0}
.moe-ops .name{font-size:15px;font-weight:600}
.moe-ops .strip{display:flex;flex-wrap:wrap;gap:6px 8px;align-items:center;margin:12px 0 4px}
.moe-ops .step{border:1.5px solid var(--hue);color:var(--hue);border-radius:6px;padding:2px 10px;font-weight:600;
font-size:13px}
.moe-ops .step.not{border-color:var(--bad);color:var(--bad);background:var(--badbox)}
.moe-ops .step.kept{border-style:dashed}
.moe-ops .step.new{--hue:var(--good);background:var(--goodbox)}
.moe-ops .flow{display:grid;grid-template-columns:minmax(0,1.7fr) 40px minmax(0,1fr);gap:0 8px;margin-top:12px;
align-items:start}
.moe-ops .big{text-align:center;font-size:26px;color:var(--soft);padding-top:18px}
.moe-ops .side{position:sticky;top:16px}
.moe-ops .head{font-weight:600;font-size:12.5px;color:var(--soft);margin:0 0 6px}
.moe-ops .stage{border:1px solid var(--line);border-left:5px solid var(--hue);border-radius:8px;background:var(--box);
padding:8px 12px}
.moe-ops .stage .what{color:var(--hue);font-weight:600}
.moe-ops .down{text-align:center;color:var(--soft);line-height:16px;height:18px}
.moe-ops .row{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:0 14px;padding:4px 0;
border-top:1px solid var(--line)}
.moe-ops .row:first-of-type{border-top:0}.moe-ops .row .shape{text-align:right;color:var(--soft);white-space:nowrap}
.moe-ops .stop{background:var(--badbox);outline:2px solid var(--bad);border-radius:6px;padding:4px 8px;margin:3px 0}
.moe-ops .stop .flag{color:var(--bad);font-weight:600;font-size:12px}
.moe-ops .op{border:2px solid var(--good);border-radius:10px;background:var(--goodbox);padding:12px 14px}
.moe-ops .op .title{color:var(--good);font-weight:700;font-size:15px}
.moe-ops .no{border:2px solid var(--bad);border-radius:10px;background:var(--badbox);padding:12px 14px}
.moe-ops .no .title{color:var(--bad);font-weight:700}
.moe-ops table{border-collapse:collapse;margin:6px 0;font-size:13px;background:none}
.moe-ops th,.moe-ops td{text-align:left;padding:3px 12px 3px 0;border:0;border-bottom:1px solid var(--line);
vertical-align:top;color:inherit;background:none}
.moe-ops details{margin-top:8px}.moe-ops summary{cursor:pointer;color:var(--soft);font-size:12.5px}
.moe-ops ul{margin:4px 0;padding-left:20px}
@media (max-width:760px){.moe-ops .flow{grid-template-columns:minmax(0,1fr)}.moe-ops .side{position:static}
.moe-ops .big{padding:0;transform:rotate(90deg)}.moe-ops .row{grid-template-columns:minmax(0,1fr)}
.moe-ops .row .shape{text-align:left}}
"""
