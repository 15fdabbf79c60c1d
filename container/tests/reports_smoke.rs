//! The fuzz target of reports of the guest, with fixed inputs.

mod hostile_reports;

/// Parts of the output of a serial port.
const PARTS: &[&str] = &[
    "\n",
    "\r",
    "transom-report: ",
    "transom-report: windows-pe\n",
    "transom-report: began apply-image\n",
    "transom-report: failed setup\n",
    "transom-report: failed copy\n",
    "transom-report: specialize\n",
    "transom-report: setup-complete\n",
    "transom-report: install-started\n",
    "transom-report: install-ended -2147483648\n",
    "transom-report: ready\n",
    "transom-report: log-begins\n",
    "transom-report: log \u{202e}\u{200b}x\u{1b}[2J y\n",
    "[=== 43.0% ]\n",
    "[100%]\r",
    "BdsDxe: starting Boot0001 \"DVD-ROM\" from Pci(0x1)\n",
    "BdsDxe: starting Boot0004 \"x\" from HD(1)\n",
    "log ",
];

/// Numbers that look random, and are the same each time (Marsaglia's xorshift).
fn next(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state >> 33).unwrap_or_default()
}

#[test]
fn any_order_of_reports_is_no_danger() {
    let mut installed = 0;
    for seed in 1..400 {
        let mut state = u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15);
        let parts = (0..60).map(|_| PARTS[next(&mut state) % PARTS.len()]);
        let text: String = parts.collect();
        installed += u32::from(hostile_reports::read(text.as_bytes()).installation().is_some());
    }
    assert!(installed > 100, "{installed}");
}

#[test]
fn a_flood_of_reports_is_no_danger() {
    for part in PARTS {
        hostile_reports::read(part.repeat(100_000).as_bytes());
    }
    let all = PARTS.concat().repeat(10_000);
    hostile_reports::read(all.as_bytes());
}
