//! The fuzzer of the agent's answers, for as long as a test may take and always the same.

mod hostile_agent;
mod noise;

use self::noise::Noise;

const ROUNDS: u64 = 30_000;

/// What answers are made of.
const PARTS: &[&[u8]] = &[
    b"\xff",
    b"\n",
    b"{\"return\": ",
    b"{\"error\": ",
    b"{\"class\": \"GenericError\", \"desc\": \"no\"}",
    b"{\"class\": 7}",
    b"7",
    b"7}\n",
    b"\xff{\"return\": 7}\n",
    b"}",
    b"}\n",
    b"[",
    b"]",
    b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    b",",
    b"{\"exited\": true",
    b"{\"exited\": false}",
    b", \"exitcode\": ",
    b", \"exitcode\": -1}",
    b", \"signal\": 9}",
    b", \"out-data\": \"aGkK\"",
    b", \"err-data\": \"a",
    b", \"out-truncated\": true}",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1e999",
    b"{\"pretty-name\": \"a\\u001b[2J\"}",
    b"{\"ip-addresses\": [{\"ip-address\": \"fe80::1%2\"}]}",
    b"{\"ip-addresses\": ",
    b"\"\\ud800\"",
    b"\"",
    b"null",
    b" ",
    b"\0",
];

#[test]
fn whatever_an_agent_says_is_an_answer_or_none() {
    for seed in 0..ROUNDS {
        let mut noise = Noise(seed);
        let mut bytes = Vec::new();
        for _ in 0..noise.below(10) {
            bytes.extend(PARTS[noise.below(PARTS.len())]);
        }
        // Said in pieces of some length.
        let size = 1 + noise.below(60);
        let pieces = bytes.chunks(size).map(|it| [&[u8::try_from(it.len()).unwrap()], it].concat());
        hostile_agent::says(&pieces.collect::<Vec<_>>().concat());
        hostile_agent::says(&bytes);
    }
}

#[test]
fn a_very_long_answer_is_no_danger() {
    for part in PARTS {
        let mut piece = vec![255];
        piece.extend(part.iter().cycle().take(255));
        hostile_agent::says(&piece.repeat(2_000));
        hostile_agent::says(&part.repeat(20_000));
    }
}
