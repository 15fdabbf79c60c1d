//! What the kernel's interface makes unsafe: leaving the network, and what a signal tells.
#![expect(unsafe_code, reason = "a signal's details are a union, and a name space is a raw call")]

use std::ffi::c_void;
use std::io;

use anyhow::Context;
use vmm_sys_util::signal::register_signal_handler;

use crate::STATUS;

/// Moves this thread, and those that it starts, to a network that has nothing. Sockets that are
/// open stay where they were made.
///
/// # Errors
///
/// When we may not.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: only the network of later sockets changes; no memory and no file descriptor does.
    let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    if left < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Says which system call is not allowed, and in which thread, and ends the process.
///
/// # Errors
///
/// When there can be no handler.
pub(crate) fn end_on_refusal() -> anyhow::Result<()> {
    register_signal_handler(libc::SIGSYS, refused).context("a handler for refusals")
}

/// `siginfo_t` of SIGSYS.
#[repr(C)]
#[derive(Clone, Copy)]
struct Refusal {
    signal: [i32; 4],
    address: u64,
    call: i32,
    architecture: u32,
}

extern "C" fn refused(_: i32, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a whole `siginfo_t`, whose first 32 bytes are these for SIGSYS.
    let refusal = unsafe { info.cast::<Refusal>().read_unaligned() };
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes 16 bytes, and so many are there.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let mut line = Line::default();
    line.add(b"vmm: the jail forbids system call ");
    line.add_number(refusal.call.unsigned_abs());
    line.add(b" in thread `");
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    line.add(&name[..length]);
    line.add(b"`: please report it; `--jail seccomp=off` goes without\n");
    rustix::io::write(rustix::stdio::stderr(), line.text()).ok();
    // SAFETY: it ends the process, and nothing of it runs any more.
    unsafe { libc::_exit(STATUS.into()) };
}

/// Text without an allocator, which the thread may have been in the middle of.
struct Line {
    bytes: [u8; 160],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 160], length: 0 }
    }
}

impl Line {
    fn add(&mut self, more: &[u8]) {
        for (to, from) in self.bytes[self.length..].iter_mut().zip(more) {
            *to = *from;
            self.length += 1;
        }
    }

    fn add_number(&mut self, number: u32) {
        let mut digits = [0_u8; 10];
        let mut rest = number;
        let mut first = digits.len();
        loop {
            first -= 1;
            // A digit is small.
            digits[first] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.add(&digits[first..]);
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_line_holds_numbers_and_ends_where_it_is_full() {
        for number in [0, 7, 435, u32::MAX] {
            let mut line = Line::default();
            line.add_number(number);
            assert_eq!(line.text(), number.to_string().as_bytes());
        }
        let mut line = Line::default();
        line.add(&[b'x'; 200]);
        line.add_number(5);
        assert_eq!(line.text(), [b'x'; 160]);
    }
}
