//! For tests with a tap: a network namespace, and packets from the guest.
#![expect(unsafe_code, reason = "a thread moves into a network namespace")]

use std::path::Path;
use std::process::Command;

use crate::net::HEADER_LENGTH;

/// The guest's MAC address, as in the host's neighbor table.
pub const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// Runs a test on a thread in a network namespace of its own, which ends with the thread. If that
/// is not possible, calls `skipped` with the test's name and the reason.
pub fn in_namespace(skipped: fn(&str, &str), test: impl FnOnce() + Send + 'static) {
    let body = move || {
        // SAFETY: it only moves this new thread into an empty network namespace.
        let moved = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        if moved < 0 || !Path::new("/dev/net/tun").exists() {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            return skipped(&name, "needs root and /dev/net/tun");
        }
        test();
    };
    let name = std::thread::current().name().unwrap_or("a test of taps").to_owned();
    std::thread::Builder::new().name(name).spawn(body).unwrap().join().unwrap();
}

/// Runs `ip` of iproute2 and returns its output.
pub fn ip(words: &str) -> String {
    let done = Command::new("ip").args(words.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Gives the host's end an IP address, and adds the guest to the neighbor table.
pub fn set_addresses() {
    ip("addr add 10.9.0.1/24 dev vm0");
    ip("link set vm0 up");
    ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev vm0");
}

/// The Internet checksum (RFC 1071) of `parts`, before its complement is taken.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 =
        words.map(|it| u32::from(it[0]) << 8 | u32::from(*it.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    u16::try_from(sum).unwrap()
}

/// A UDP packet from the guest to port 7 of the host. Its checksum is partial: the host has to
/// complete it. With `gso`, it is to be cut into datagrams with this payload size.
pub fn packet(payload: &[u8], gso: Option<u16>) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).unwrap();
    let mut header = [0; HEADER_LENGTH];
    // NEEDS_CSUM: the checksum begins at byte 34, and is stored 6 bytes behind that.
    header[0] = 1;
    header[6..10].copy_from_slice(&[34, 0, 6, 0]);
    if let Some(size) = gso {
        // UDP_L4, and 42 bytes of headers.
        header[1..4].copy_from_slice(&[5, 42, 0]);
        header[4..6].copy_from_slice(&size.to_le_bytes());
    }
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1];
    ip[2..4].copy_from_slice(&(20 + length).to_be_bytes());
    let check = !checksum(&[&ip]);
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    let pseudo = checksum(&[&ip[12..], &[0, 17], &length.to_be_bytes()]);
    let ports =
        [[0, 9, 0, 7], [length.to_be_bytes(), pseudo.to_be_bytes()].concat().try_into().unwrap()];
    [&header[..], &[0xff; 6], &GUEST, &[8, 0], &ip, &ports.concat(), payload].concat()
}
