//! Levels of processors: the guest sees what each processor of the level has, so that a saved or
//! moved machine continues on hosts whose processors differ.

use anyhow::ensure;
use kvm_bindings::kvm_cpuid_entry2 as Leaf;

use super::{clear, registers};
use crate::config::Level;

/// Registers by their number, as in the other tables of CPUID.
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// The promises of each level (System V ABI for x86-64, 3.1.1), and AES, without which disks that
/// Windows encrypts are slow: level, leaf, register, bit, name.
const NEEDED: &[(Level, u32, usize, u32, &str)] = &[
    (Level::V2, 1, ECX, 0, "SSE3"),
    (Level::V2, 1, ECX, 9, "SSSE3"),
    (Level::V2, 1, ECX, 13, "CMPXCHG16B"),
    (Level::V2, 1, ECX, 19, "SSE4.1"),
    (Level::V2, 1, ECX, 20, "SSE4.2"),
    (Level::V2, 1, ECX, 23, "POPCNT"),
    (Level::V2, 1, ECX, 25, "AES"),
    (Level::V2, 0x8000_0001, ECX, 0, "LAHF"),
    (Level::V3, 1, ECX, 12, "FMA"),
    (Level::V3, 1, ECX, 22, "MOVBE"),
    (Level::V3, 1, ECX, 26, "XSAVE"),
    (Level::V3, 1, ECX, 28, "AVX"),
    (Level::V3, 1, ECX, 29, "F16C"),
    (Level::V3, 7, EBX, 3, "BMI1"),
    (Level::V3, 7, EBX, 5, "AVX2"),
    (Level::V3, 7, EBX, 8, "BMI2"),
    (Level::V3, 0x8000_0001, ECX, 5, "LZCNT"),
    (Level::V4, 7, EBX, 16, "AVX512F"),
    (Level::V4, 7, EBX, 17, "AVX512DQ"),
    (Level::V4, 7, EBX, 28, "AVX512CD"),
    (Level::V4, 7, EBX, 30, "AVX512BW"),
    (Level::V4, 7, EBX, 31, "AVX512VL"),
];

/// The bits that stay: leaf, subleaf, register, those of the second level, and what the third and
/// the fourth add. The oldest processors of the levels are Westmere, Haswell and Excavator, and
/// Skylake-SP. Mitigations of a processor's flaws stay at every level: a guest that uses one does
/// not continue on a host without it. So do bits of virtual hardware and of nested virtualization.
const KEPT: &[(u32, u32, usize, [u32; 3])] = &[
    // SSE, AES, VMX, x2APIC, the deadline timer, a hypervisor; XSAVE, AVX, RDRAND. PCID never.
    (1, 0, ECX, [0x83b8_2223, 0x7440_1000, 0]),
    // Everything up to SSE2, but not what reports temperatures.
    (1, 0, EDX, [0x178b_fbff, 0, 0]),
    // The APIC's timer always runs.
    (6, 0, EAX, [1 << 2, 0, 0]),
    // FSGSBASE, BMI, AVX2, SMEP; ERMS, INVPCID, AVX-512, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB.
    (7, 0, EBX, [0, 0x0000_01a9, 0xd19f_0600]),
    (7, 0, ECX, [0; 3]),
    // SRBDS, MD_CLEAR, IBRS, STIBP, L1D_FLUSH, ARCH_CAPABILITIES, SSBD.
    (7, 0, EDX, [0xbc00_0600, 0, 0]),
    (7, 1, EAX, [0; 3]),
    (7, 1, EBX, [0; 3]),
    (7, 1, ECX, [0; 3]),
    (7, 1, EDX, [0; 3]),
    // Controls of predictors.
    (7, 2, EDX, [0x3f, 0, 0]),
    // Registers of the FPU, SSE, AVX, AVX-512.
    (0xd, 0, EAX, [0, 0b111, 0b1110_0000]),
    (0xd, 0, EDX, [0; 3]),
    // XSAVEOPT; XSAVEC, XGETBV.
    (0xd, 1, EAX, [0, 1, 0b110]),
    (0xd, 1, EBX, [0; 3]),
    (0xd, 1, ECX, [0; 3]),
    (0xd, 1, EDX, [0; 3]),
    // LAHF, legacy multi-core mode, SVM, CR8, topology; LZCNT; PREFETCHW.
    (0x8000_0001, 0, ECX, [0x0040_0017, 1 << 5, 1 << 8]),
    // Pages of 1 GiB not at first; 3DNow! never.
    (0x8000_0001, 0, EDX, [0x3bff_ffff, 1 << 26, 0]),
    (0x8000_0007, 0, EDX, [super::INVARIANT_TSC, 0, 0]),
    // IBPB, IBRS, STIBP, SSBD and how to use them.
    (0x8000_0008, 0, EBX, [0x730f_d000, 0, 0]),
    // Automatic IBRS, and what predictors need no more.
    (0x8000_0021, 0, EAX, [0x7800_0120, 0, 0]),
];

/// Leaves without anything that all processors of a level have: performance counters, traces,
/// AMX, AVX10, profiling.
const CLEARED: &[u32] =
    &[0xa, 0x14, 0x19, 0x1d, 0x1e, 0x20, 0x23, 0x24, 0x8000_001b, 0x8000_0020, 0x8000_0022];

/// The width of addresses of the smallest processors, physical and virtual.
const WIDTHS: [u32; 2] = [39, 48];
/// The part of XSAVE's area before the registers of AVX.
const LEGACY_AREA: u32 = 576;

/// Cuts the features to those of the level. Fails if the processor lacks some of them.
pub(super) fn apply(leaves: &mut [Leaf], level: Level) -> anyhow::Result<()> {
    let lacking: Vec<_> = lacks(leaves, level).collect();
    ensure!(
        lacking.is_empty(),
        "--features level={}: this host's processor lacks {}: {}",
        level.name(),
        lacking.join(", "),
        match [Level::V3, Level::V2].into_iter().find(|it| lacks(leaves, *it).next().is_none()) {
            Some(lower) => format!("choose {}", lower.name()),
            None => "leave the level out".into(),
        }
    );
    let mut kept = 0;
    for leaf in leaves.iter_mut() {
        let at = (leaf.function, leaf.index);
        for (_, _, register, bits) in KEPT.iter().filter(|it| (it.0, it.1) == at) {
            let bits = bits.iter().take(1 + level as usize).fold(0, |all, it| all | it);
            *register_of(leaf, *register) &= bits;
        }
        match at {
            (0xd, 0) => kept = leaf.eax,
            (0x8000_0008, _) => {
                let widths = leaf.eax.to_le_bytes();
                let [physical, linear] = [0, 1].map(|at| WIDTHS[at].min(widths[at].into()));
                leaf.eax = physical | linear << 8;
            }
            (function, _) if CLEARED.contains(&function) => clear(leaf),
            _ => {}
        }
    }
    fit_area(leaves, kept);
    Ok(())
}

/// Makes XSAVE's area as large as these components need it.
fn fit_area(leaves: &mut [Leaf], kept: u32) {
    let mut size = if kept == 0 { 0 } else { LEGACY_AREA };
    for leaf in leaves.iter_mut().filter(|it| it.function == 0xd && it.index > 1) {
        if kept.checked_shr(leaf.index).is_some_and(|it| it & 1 == 1) {
            size = size.max(leaf.eax.saturating_add(leaf.ebx));
        } else {
            clear(leaf);
        }
    }
    for leaf in leaves.iter_mut().filter(|it| (it.function, it.index) == (0xd, 0)) {
        (leaf.ebx, leaf.ecx) = (size, size);
    }
}

/// The names of what a processor lacks of a level.
fn lacks(leaves: &[Leaf], level: Level) -> impl Iterator<Item = &'static str> {
    let has = |function, register: usize, bit: u32| {
        registers(leaves, function, 0)[register] >> bit & 1 == 1
    };
    let needed = NEEDED.iter().filter(move |it| it.0 <= level);
    needed.filter(move |it| !has(it.1, it.2, it.3)).map(|it| it.4)
}

fn register_of(leaf: &mut Leaf, register: usize) -> &mut u32 {
    match register {
        EAX => &mut leaf.eax,
        EBX => &mut leaf.ebx,
        ECX => &mut leaf.ecx,
        _ => &mut leaf.edx,
    }
}

#[cfg(test)]
mod test {
    use super::super::{FEATURES, check};
    use super::*;

    const FULL: [u32; 4] = [u32::MAX; 4];

    fn leaf(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> Leaf {
        Leaf { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    /// A processor with all features.
    fn newest() -> Vec<Leaf> {
        let features = FEATURES.iter().map(|it| leaf(it.0, it.1, FULL));
        let areas =
            [(2, 256, 576), (5, 64, 1088), (6, 512, 1152), (7, 1024, 1664), (18, 8192, 2752)];
        let areas = areas.map(|(index, size, at)| leaf(0xd, index, [size, at, 0, 0]));
        let others = [leaf(0, 0, [0x20, 1, 2, 3]), leaf(0xa, 0, FULL)];
        let mut all: Vec<_> = features.chain(areas).chain(others).collect();
        for it in all.iter_mut().filter(|it| it.function == 0x8000_0008) {
            it.eax = 0x3934;
        }
        all
    }

    /// The oldest processor of a level: it has what the level keeps, and narrow addresses.
    fn oldest(level: Level) -> Vec<Leaf> {
        let mut all = newest();
        apply(&mut all, level).unwrap();
        all
    }

    fn find(leaves: &[Leaf], function: u32, index: u32) -> Leaf {
        *leaves.iter().find(|it| (it.function, it.index) == (function, index)).unwrap()
    }

    #[test]
    fn a_machine_of_a_level_continues_on_every_processor_of_it() {
        for level in [Level::V2, Level::V3, Level::V4] {
            let saved = oldest(level);
            check(&saved, &newest()).unwrap();
            let mut again = saved.clone();
            apply(&mut again, level).unwrap();
            assert_eq!(format!("{again:?}"), format!("{saved:?}"));
        }
        assert!(check(&oldest(Level::V3), &oldest(Level::V2)).is_err());
        assert!(check(&oldest(Level::V2), &oldest(Level::V3)).is_ok());
    }

    #[test]
    fn each_compared_register_is_cut() {
        // Those of hypervisors and of nested virtualization are not the processor's.
        let own = |function: &u32| *function < 0x4000_0000 || *function > 0x8000_0000;
        for (function, index, compared) in
            FEATURES.iter().filter(|it| own(&it.0) && it.0 != 0x8000_000a)
        {
            for register in (0..4).filter(|at| compared >> at & 1 == 1) {
                let here = |it: &&(u32, u32, usize, [u32; 3])| {
                    (it.0, it.1, it.2) == (*function, *index, register)
                };
                assert_eq!(KEPT.iter().filter(here).count(), 1, "{function:#x} {index} {register}");
            }
        }
        // A level keeps all that it needs.
        for (level, function, register, bit, name) in NEEDED {
            let kept = registers(&oldest(*level), *function, 0)[*register];
            assert_eq!(kept >> bit & 1, 1, "{name}");
        }
    }

    #[test]
    fn what_is_missing_has_a_name() {
        let mut all = oldest(Level::V3);
        for it in all.iter_mut().filter(|it| it.function == 7) {
            it.ebx &= !(1 << 5 | 1 << 8);
        }
        let said = apply(&mut all.clone(), Level::V3).unwrap_err().to_string();
        let wanted = "--features level=x86-64-v3: this host's processor lacks AVX2, BMI2: choose \
                      x86-64-v2";
        assert_eq!(said, wanted);
        apply(&mut all, Level::V2).unwrap();
        let said = apply(&mut [], Level::V2).unwrap_err().to_string();
        assert!(said.ends_with("POPCNT, AES, LAHF: leave the level out"), "{said}");
    }

    #[test]
    fn counters_wide_addresses_and_large_areas_are_gone() {
        for (level, size) in [(Level::V2, 0), (Level::V3, 832), (Level::V4, 2688)] {
            let all = oldest(level);
            assert_eq!(find(&all, 0xa, 0).eax, 0);
            assert_eq!(find(&all, 0x8000_0008, 0).eax, 0x3027);
            let area = find(&all, 0xd, 0);
            assert_eq!((area.ebx, area.ecx), (size, size));
            assert_eq!(find(&all, 0xd, 18).eax, 0, "AMX is of no level");
            assert_eq!(find(&all, 0xd, 2).eax > 0, level > Level::V2);
        }
    }
}
