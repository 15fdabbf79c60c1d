//! System calls of Linux, and text in buffers of a fixed size.
use core::arch::{asm, global_asm};
use core::fmt::{self, Write};

// The kernel starts the program here, with an aligned stack.
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "call init_main", "ud2");

const READ: usize = 0;
const WRITE: usize = 1;
const OPEN: usize = 2;
const CLOSE: usize = 3;
const NANOSLEEP: usize = 35;
const READLINK: usize = 89;
const MOUNT: usize = 165;
const REBOOT: usize = 169;
const GETDENTS64: usize = 217;
const FINIT_MODULE: usize = 313;

const O_NONBLOCK: usize = 0o4000;
/// Linux decompresses the module itself, if it was built for that.
const MODULE_INIT_COMPRESSED_FILE: usize = 4;
const ENOEXEC: isize = -8;

/// The result, or a negative error number.
fn call(number: usize, arguments: [usize; 5]) -> isize {
    let result;
    // SAFETY: each caller passes buffers that are valid for their length until the call returns,
    // and text that ends with a zero byte.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") arguments[0],
            in("rsi") arguments[1], in("rdx") arguments[2], in("r10") arguments[3],
            in("r8") arguments[4], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A text of at most 511 bytes, followed by a zero byte. Further bytes are dropped.
pub(crate) struct Text {
    bytes: [u8; 512],
    length: usize,
}

impl Text {
    pub(crate) fn new(arguments: fmt::Arguments) -> Self {
        let mut text = Self { bytes: [0; 512], length: 0 };
        text.write_fmt(arguments).ok();
        text
    }

    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }

    fn address(&self) -> usize {
        self.bytes.as_ptr() as usize
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes().take(self.bytes.len() - 1 - self.length) {
            self.bytes[self.length] = byte;
            self.length += 1;
        }
        Ok(())
    }
}

/// Writes a line to the console in one call, so that messages of the kernel do not divide it.
pub(crate) fn say(arguments: fmt::Arguments) {
    let line = Text::new(format_args!("\ntransom: {arguments}\n"));
    call(WRITE, [1, line.address(), line.length, 0, 0]);
}

pub(crate) fn mount(kind: &str, at: &str) {
    let [kind, at] = [kind, at].map(|text| Text::new(format_args!("{text}")));
    call(MOUNT, [kind.address(), at.address(), kind.address(), 0, 0]);
}

/// An open file, for reading without waiting.
pub(crate) struct File(usize);

impl File {
    pub(crate) fn open(path: fmt::Arguments) -> Option<Self> {
        let path = Text::new(path);
        let file = call(OPEN, [path.address(), O_NONBLOCK, 0, 0, 0]);
        usize::try_from(file).ok().map(Self)
    }

    /// Returns the number of bytes, 0 at the end or after an error.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> usize {
        self.fill(READ, bytes)
    }

    fn fill(&self, number: usize, bytes: &mut [u8]) -> usize {
        let got = call(number, [self.0, bytes.as_mut_ptr() as usize, bytes.len(), 0, 0]);
        usize::try_from(got).unwrap_or(0).min(bytes.len())
    }

    /// Calls `tell` with the name of each entry of a folder that does not begin with a dot.
    pub(crate) fn names(&self, mut tell: impl FnMut(&str)) {
        let mut bytes = [0; 1024];
        loop {
            let filled = self.fill(GETDENTS64, &mut bytes);
            let mut rest = &bytes[..filled];
            // struct linux_dirent64: number, offset, length of the entry, type, name.
            while let [_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, low, high, _, name @ ..] =
                rest
            {
                let length = usize::from(u16::from_le_bytes([*low, *high]));
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                tell_name(name, &mut tell);
                rest = rest.get(length.max(1)..).unwrap_or_default();
            }
            if filled == 0 {
                return;
            }
        }
    }
}

fn tell_name(name: &[u8], tell: &mut impl FnMut(&str)) {
    if let Ok(name) = str::from_utf8(name)
        && !name.starts_with('.')
    {
        tell(name);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        call(CLOSE, [self.0, 0, 0, 0, 0]);
    }
}

/// The first line of a file; empty if it cannot be read.
pub(crate) fn first_line(path: fmt::Arguments) -> Text {
    let mut bytes = [0; 256];
    let read = File::open(path).map_or(0, |file| file.read(&mut bytes));
    let line = bytes[..read].split(|byte| *byte == b'\n').next().unwrap_or_default();
    Text::new(format_args!("{}", str::from_utf8(line).unwrap_or("?").trim_ascii()))
}

/// The last part of the path that a symbolic link names; `-` if there is none.
pub(crate) fn link_name(path: fmt::Arguments) -> Text {
    let (path, mut bytes) = (Text::new(path), [0; 256]);
    let arguments = [path.address(), bytes.as_mut_ptr() as usize, bytes.len(), 0, 0];
    let read = usize::try_from(call(READLINK, arguments)).unwrap_or(0).min(bytes.len());
    let target = str::from_utf8(&bytes[..read]).unwrap_or_default();
    let name = target.rsplit('/').next().filter(|name| !name.is_empty());
    Text::new(format_args!("{}", name.unwrap_or("-")))
}

/// Loads a module of the kernel, compressed or not. Returns the error number, 0 if there is none.
pub(crate) fn load_module(file: &File) -> isize {
    let none = Text::new(format_args!(""));
    match call(FINIT_MODULE, [file.0, none.address(), 0, 0, 0]) {
        ENOEXEC => -call(FINIT_MODULE, [file.0, none.address(), MODULE_INIT_COMPRESSED_FILE, 0, 0]),
        result => -result,
    }
}

pub(crate) fn sleep(milliseconds: u64) {
    let time = [milliseconds / 1000, milliseconds % 1000 * 1_000_000];
    call(NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0]);
}

/// Powers the machine off. Returns only if Linux cannot.
pub(crate) fn power_off() {
    call(REBOOT, [0xfee1_dead, 0x2812_1969, 0x4321_fedc, 0, 0]);
}
