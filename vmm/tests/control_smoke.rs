//! The fuzzer of the control socket, for as long as a test may take and always the same.

mod hostile_client;

use devices::testutil::hostile::Noise;
use vmm::control::COMMANDS;

const ROUNDS: u64 = 2000;

/// What commands are made of, in JSON and as they are typed.
const PARTS: [&str; 16] = [
    "{\"command\": \"",
    "\", \"",
    "\": \"",
    "\"}\n",
    "}\n",
    " ",
    "name",
    "size",
    "state",
    "mtu",
    "1G",
    "up",
    "70000",
    "-1",
    "\u{e9}",
    "\n",
];

#[test]
fn every_line_is_answered_and_no_client_ends_the_talk_of_another() {
    let machine = hostile_client::Machine::new();
    for seed in 0..ROUNDS {
        let mut noise = Noise::new(seed);
        let mut text = String::new();
        for _ in 0..noise.below(24) {
            let word = usize::try_from(noise.below(32)).unwrap();
            text.push_str(PARTS.get(word).unwrap_or(&COMMANDS[word % COMMANDS.len()].name));
        }
        hostile_client::typed(&text);
        let mut bytes = text.into_bytes();
        if seed % 16 == 0 {
            bytes.extend(noise.take(40));
        }
        machine.serve(&bytes);
    }
    machine.serve(&[b'['; 300 << 10]);
    machine.serve(b"{\"command\": \"status\"}\n");
}
