//! Sends a line that is too long to the control socket. The fuzz target `control` covers the rest.

mod hostile_client;

#[test]
fn a_very_long_line_ends_only_its_own_connection() {
    let machine = hostile_client::Machine::new();
    hostile_client::typed("status");
    machine.serve(&[b'['; 300 << 10]);
    machine.serve(b"{\"command\": \"status\"}\n");
}
