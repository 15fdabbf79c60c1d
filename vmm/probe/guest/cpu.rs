//! The processor: its identification, the rate of its time stamp counter, and its speed.
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;

use crate::Session;
use crate::clock::Clock;
use crate::gate::{control_registers, cpuid};
use crate::io::tsc;
use crate::report::Finding;

/// Properties that later checks need.
pub(crate) struct Cpu {
    pub(crate) tsc_hz: u64,
    pub(crate) gib_pages: bool,
    pub(crate) physical_bits: u32,
    pub(crate) logical: u64,
}

impl Cpu {
    /// The number of time stamp counts in a time.
    pub(crate) fn counts(&self, microseconds: u64) -> u64 {
        self.tsc_hz * microseconds / 1_000_000
    }

    pub(crate) fn nanoseconds(&self, counts: u64) -> u64 {
        (u128::from(counts) * 1_000_000_000 / u128::from(self.tsc_hz.max(1))) as u64
    }

    /// Polls until a condition holds. Returns `None` if that takes too long.
    pub(crate) fn wait(&self, timeout_ms: u64, mut until: impl FnMut() -> bool) -> Option<()> {
        let start = tsc();
        while !until() {
            if self.nanoseconds(tsc() - start) > timeout_ms * 1_000_000 {
                return None;
            }
        }
        Some(())
    }
}

pub(crate) fn check(session: &mut Session, clock: Option<&Clock>) -> Cpu {
    let [highest, b, c, d] = cpuid(0, 0);
    let vendor = text(session, &[b, d, c]);
    let [signature, b1, c1, _] = cpuid(1, 0);
    let extended = cpuid(0x8000_0000, 0)[0];
    let brand = if extended >= 0x8000_0004 {
        let [first, second, third] = [2, 3, 4].map(|leaf| cpuid(0x8000_0000 | leaf, 0));
        text(session, &[first, second, third].concat_words())
    } else {
        ""
    };
    let hypervisor = if c1 >> 31 == 1 {
        let [_, b, c, d] = cpuid(0x4000_0000, 0);
        text(session, &[b, c, d])
    } else {
        ""
    };
    let [_, _, _, features] = if extended >= 0x8000_0001 { cpuid(0x8000_0001, 0) } else { [0; 4] };
    let invariant = extended >= 0x8000_0007 && cpuid(0x8000_0007, 0)[3] >> 8 & 1 == 1;
    let physical_bits = if extended >= 0x8000_0008 { cpuid(0x8000_0008, 0)[0] & 0xff } else { 36 };
    let logical = logical(highest, b1);
    let (family, model) = family_and_model(signature);
    // If the host runs ring 3 as a process of its own, CPUID there may return the host's values.
    let ring3 = __cpuid_count(1, 0);
    session.add(
        Finding::info("cpu")
            .text("vendor", vendor)
            .text("brand", brand)
            .number("family", family.into())
            .number("model", model.into())
            .number("stepping", (signature & 0xf).into())
            .text("hypervisor", hypervisor)
            .number("logical", logical)
            .number("physical_bits", physical_bits.into())
            .flag("invariant_tsc", invariant)
            .flag("gib_pages", features >> 26 & 1 == 1)
            .flag("ring3_cpuid_same", ring3.eax == signature && ring3.ebx >> 24 == b1 >> 24),
    );
    let [cr0, cr3, cr4] = control_registers();
    session.add(Finding::info("control").hex("cr0", cr0).hex("cr3", cr3).hex("cr4", cr4));
    let tsc_hz = frequency(session, clock, highest);
    let cpu = Cpu { tsc_hz, gib_pages: features >> 26 & 1 == 1, physical_bits, logical };
    speed(session, &cpu);
    cpu
}

trait Concat {
    fn concat_words(&self) -> [u32; 12];
}

impl Concat for [[u32; 4]; 3] {
    fn concat_words(&self) -> [u32; 12] {
        core::array::from_fn(|index| self[index / 4][index % 4])
    }
}

fn text(session: &mut Session, words: &[u32]) -> &'static str {
    let mut bytes = [0; 48];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    let used = bytes.iter().position(|&byte| byte == 0).unwrap_or(48);
    let clean = bytes.map(|byte| if (0x20..0x7f).contains(&byte) { byte } else { b'?' });
    session.text(format_args!("{}", core::str::from_utf8(&clean[..used]).unwrap_or("").trim()))
}

fn family_and_model(signature: u32) -> (u32, u32) {
    let (family, model) = (signature >> 8 & 0xf, signature >> 4 & 0xf);
    let whole_family = if family == 15 { family + (signature >> 20 & 0xff) } else { family };
    let extended = matches!(family, 6 | 15);
    (whole_family, if extended { model | signature >> 12 & 0xf0 } else { model })
}

/// The logical processors of this package: from leaf 0xB's highest level, or else from leaf 1.
fn logical(highest: u32, leaf1_ebx: u32) -> u64 {
    let mut count = 0;
    if highest >= 0xb {
        for level in 0..4 {
            let [_, b, c, _] = cpuid(0xb, level);
            if c >> 8 & 0xff == 0 {
                break;
            }
            count = b & 0xffff;
        }
    }
    u64::from(if count == 0 { (leaf1_ebx >> 16 & 0xff).max(1) } else { count })
}

fn frequency(session: &mut Session, clock: Option<&Clock>, highest: u32) -> u64 {
    let [denominator, numerator, crystal, _] =
        if highest >= 0x15 { cpuid(0x15, 0) } else { [0; 4] };
    let ratio = u64::from(crystal) * u64::from(numerator);
    let nominal = ratio.checked_div(denominator.into()).unwrap_or(0);
    let Some(clock) = clock else {
        session.add(Finding::check("tsc", false).text("clock", "none").number("told_hz", nominal));
        return nominal.max(1_000_000_000);
    };
    let start = clock.start();
    let mut passed = (0, 0);
    while passed.0 < 20_000_000 {
        passed = clock.since(&start);
    }
    let hz = (u128::from(passed.1) * 1_000_000_000 / u128::from(passed.0)) as u64;
    session.add(
        Finding::check("tsc", (100_000_000..20_000_000_000).contains(&hz))
            .text("clock", clock.name())
            .number("hz", hz)
            .number("told_hz", nominal),
    );
    hz.max(1)
}

/// Measures a loop of two instructions, which takes at least one cycle per turn. The result
/// distinguishes native from interpreted code.
fn speed(session: &mut Session, cpu: &Cpu) {
    const TURNS: u64 = 4_000_000;
    let start = tsc();
    // SAFETY: counts a register down to zero.
    unsafe {
        asm!("2:", "dec {0}", "jnz 2b", inout(reg) TURNS => _, options(nomem, nostack));
    }
    let nanoseconds = cpu.nanoseconds(tsc() - start).max(1);
    session.add(Finding::info("speed").number("loops_per_us", TURNS * 1000 / nanoseconds));
}
