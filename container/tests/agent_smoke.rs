//! Very long answers of the agent. The fuzz target `agent` covers the rest.

mod hostile_agent;

/// Parts of answers.
const PARTS: &[&[u8]] = &[
    b"\xff",
    b"\n",
    b"{\"return\": ",
    b"{\"error\": ",
    b"7}\n",
    b"}",
    b"[",
    b"{\"ip-addresses\": ",
    b"\"\\ud800\"",
    b"\"",
    b" ",
    b"\0",
];

#[test]
fn survives_a_very_long_answer() {
    for part in PARTS {
        let mut piece = vec![255];
        piece.extend(part.iter().cycle().take(255));
        hostile_agent::answer_with(&piece.repeat(2_000));
        hostile_agent::answer_with(&part.repeat(20_000));
    }
}
