//! The fuzz target of QEMU's control protocols, with fixed inputs.

mod hostile_qmp;

/// Parts of requests.
const PARTS: &[&str] = &[
    "{\"execute\":\"qmp_capabilities\"}",
    "{\"execute\":\"query-status\",\"id\":{\"a\":[1]}}",
    "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"info usb\"}}",
    "{\"execute\":\"device_add\",\"arguments\":{\"driver\":\"usb-host\"}}",
    "{\"execute\":\"send-key\",\"arguments\":{\"keys\":[{\"type\":\"qcode\",\"data\":\"a\"}]}}",
    "{\"execute\":\"screendump\",\"arguments\":{\"filename\":\"/tmp/../etc/x.ppm\"}}",
    "{\"execute\":",
    "{\"a\":",
    "\"",
    "\\",
    "}",
    "info status\n",
    "sendkey a-b-c\n",
    "screendump -f\n",
    "device_add usb-host,\n",
    " ",
    "\n",
    "\u{0}",
];

/// Numbers that look random, and are the same each time (Marsaglia's xorshift).
fn next(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state >> 33).unwrap_or_default()
}

#[test]
fn any_order_of_requests_is_no_danger() {
    let mut answered = 0;
    for seed in 1..400 {
        let mut state = u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15);
        let first = ["\u{0}", "\u{1}", "\u{2}", "\u{3}"][next(&mut state) % 4];
        let parts = (0..12).map(|_| PARTS[next(&mut state) % PARTS.len()]);
        let text = format!("{first}{}{}", PARTS[0], parts.collect::<String>());
        answered += hostile_qmp::talk(text.as_bytes()).matches("\"return\"").count();
    }
    assert!(answered > 100, "{answered}");
}

#[test]
fn long_and_deep_requests_are_refused() {
    for part in PARTS {
        for first in ["\u{0}", "\u{1}"] {
            let said = hostile_qmp::talk(format!("{first}{}", part.repeat(20_000)).as_bytes());
            assert!(said.len() < 16 << 20, "{} bytes", said.len());
        }
    }
    let deep = format!("\u{0}{}1{}", "{\"a\":".repeat(9_000), "}".repeat(9_000));
    let said = hostile_qmp::talk(deep.as_bytes());
    assert!(said.contains("JSON parse error"), "{said}");
    let long = format!("\u{0}{{\"execute\":\"{}", "x".repeat(100_000));
    assert!(hostile_qmp::talk(long.as_bytes()).contains("more than 65536 bytes"));
}
