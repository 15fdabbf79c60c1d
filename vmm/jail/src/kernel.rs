//! The parts that need unsafe code: leaving the network namespace, and the handler of SIGSYS.
#![expect(unsafe_code, reason = "a signal's details are a union, and a name space is a raw call")]

use std::ffi::c_void;
use std::io;

use anyhow::Context;
use vmm_sys_util::signal::register_signal_handler;

use crate::STATUS;

/// Moves this thread, and the threads that it starts, to an empty network namespace, which needs
/// CAP_SYS_ADMIN. Open sockets stay in the namespace in which they were made.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: only the network of later sockets changes; no memory and no file descriptor does.
    let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    if left < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a forbidden system call end the process, with a message that names the call and the
/// thread.
pub(crate) fn end_on_refusal() -> anyhow::Result<()> {
    register_signal_handler(libc::SIGSYS, refused).context("a handler for SIGSYS")
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
    // SAFETY: the kernel passes a whole `siginfo_t`; for SIGSYS it begins with these 32 bytes.
    let refusal = unsafe { info.cast::<Refusal>().read_unaligned() };
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes 16 bytes, which is the size of `name`.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let mut line = LineBuffer::default();
    line.add(b"vmm: the jail forbids system call ");
    line.add_number(refusal.call.unsigned_abs());
    line.add(b" in thread `");
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    line.add(&name[..length]);
    line.add(b"`: please report it; `--jail seccomp=off` disables the filter\n");
    rustix::io::write(rustix::stdio::stderr(), line.text()).ok();
    // SAFETY: it ends the process, so no further code runs.
    unsafe { libc::_exit(STATUS.into()) };
}

/// A line of text in a fixed buffer. The allocator may be locked by the interrupted code.
struct LineBuffer {
    bytes: [u8; 160],
    length: usize,
}

impl Default for LineBuffer {
    fn default() -> Self {
        Self { bytes: [0; 160], length: 0 }
    }
}

impl LineBuffer {
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
            // A digit always fits.
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
    fn a_line_holds_numbers_and_is_truncated_when_full() {
        for number in [0, 7, 435, u32::MAX] {
            let mut line = LineBuffer::default();
            line.add_number(number);
            assert_eq!(line.text(), number.to_string().as_bytes());
        }
        let mut line = LineBuffer::default();
        line.add(&[b'x'; 200]);
        line.add_number(5);
        assert_eq!(line.text(), [b'x'; 160]);
    }
}
