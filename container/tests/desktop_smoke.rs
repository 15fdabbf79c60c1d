//! The fuzz target of the remote desktop's gateway, with fixed inputs.

mod hostile_desktop;

use hostile_desktop::{REQUEST, send};

/// A confirm of X.224 that selects TLS.
const CONFIRM: &[u8] = &[3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 2, 0, 8, 0, 2, 0, 0, 0];

#[test]
fn every_part_of_a_request_may_be_wrong() {
    // An answer to a valid request has a version and an error.
    let valid = send(&[&[0], REQUEST].concat());
    assert!(valid.starts_with(&[0x30]) && valid.len() > 8, "{valid:?}");
    for at in 0..REQUEST.len() {
        for value in [0, 0x7f, 0x80, 0xff] {
            let mut bytes = [&[0], REQUEST].concat();
            bytes[1 + at] = value;
            assert!(send(&bytes).starts_with(&[0x30]), "byte {at} is {value:#x}");
        }
        assert!(send(&[&[0], &REQUEST[..at]].concat()).starts_with(&[0x30]), "{at} bytes");
    }
}

#[test]
fn every_part_of_a_guests_answer_may_be_wrong() {
    for at in 0..CONFIRM.len() {
        for value in [0, 3, 0x7f, 0xff] {
            let mut bytes = [&[1], CONFIRM, &[0x16, 3, 3, 0xff, 0xff, 2]].concat();
            bytes[1 + at] = value;
            assert!(send(&bytes).starts_with(&[0x30]), "byte {at} is {value:#x}");
        }
    }
}

#[test]
fn any_start_of_a_frame_passes() {
    for first in [3, 0x30, 0x64] {
        for second in 0..=u8::MAX {
            for third in [0, 1, 0x7f, 0x80, 0xff] {
                send(&[2, first, second, third, 0, 5, 0xf0, 0x80, 0x64, 3, 0, 0, 0, 0, 0]);
            }
        }
    }
}
