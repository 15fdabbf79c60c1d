//! What is too long for the control socket; the fuzz target `control` says the rest.

mod hostile_client;

#[test]
fn a_very_long_line_ends_no_talk_but_its_own() {
    let machine = hostile_client::Machine::new();
    hostile_client::typed("status");
    machine.serve(&[b'['; 300 << 10]);
    machine.serve(b"{\"command\": \"status\"}\n");
}
