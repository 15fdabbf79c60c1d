//! CPUID: the host's features, the machine's topology, and the leaves of KVM or Hyper-V.

mod features;
mod level;

use std::arch::x86_64::{__cpuid, CpuidResult};

use anyhow::Context;
use kvm_bindings::kvm_cpuid_entry2 as Leaf;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Kvm;

pub(crate) use self::features::is_nested;
use crate::config::{Cpus, Features};
use crate::hyperv::{self, Provider};
use crate::kvm;

/// How APIC IDs are composed of thread, core and socket numbers. Each number has whole bits (Intel
/// SDM 3A, 10.9.1), so the IDs have gaps if a number is not a power of two.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    cpus: Cpus,
    thread_bits: u32,
    core_bits: u32,
}

impl Topology {
    /// `cpus` must be settled.
    pub fn new(cpus: Cpus) -> Self {
        let bits = |count: u32| u32::BITS - (count - 1).leading_zeros();
        Self { cpus, thread_bits: bits(cpus.threads), core_bits: bits(cpus.cores) }
    }

    pub fn apic_id(&self, index: u32) -> u32 {
        let Cpus { cores, threads, .. } = self.cpus;
        let (thread, core, socket) =
            (index % threads, index / threads % cores, index / threads / cores);
        (socket << self.core_bits | core) << self.thread_bits | thread
    }

    /// The number of APIC ID bits below the socket number.
    fn socket_shift(&self) -> u32 {
        self.thread_bits + self.core_bits
    }

    /// The number of processors of one socket.
    fn per_socket(&self) -> u32 {
        self.cpus.cores * self.cpus.threads
    }

    /// The socket, and the core number within it.
    fn location(&self, index: u32) -> (u32, u32) {
        let Cpus { cores, threads, .. } = self.cpus;
        (index / threads / cores, index / threads % cores)
    }
}

/// The CPUID leaves that all processors of a machine share.
pub struct Model {
    leaves: Vec<Leaf>,
    topology: Topology,
    amd: bool,
}

/// Leaf 1: the local APIC has a TSC deadline timer, and there is a hypervisor.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: MTRRs; more than one processor in a package.
const MTRR: u32 = 1 << 12;
const HTT: u32 = 1 << 28;
/// Leaf 0x80000001, ECX: legacy multi-core mode (CmpLegacy); leaf 0x8000001E is valid;
/// more performance counters, which Windows Server 2022 expects only together with that leaf.
const CMP_LEGACY: u32 = 1 << 1;
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
const PERFCTR_CORE: u32 = 1 << 23;
/// Leaf 7, EDX: an Intel register that KVM also offers on AMD, where Windows fails with it.
const ARCH_CAPABILITIES: u32 = 1 << 29;
/// Leaf 0x40000004, EAX: recommendations to a Hyper-V guest (TLFS 2.4.5).
const APIC_BY_MSR: u32 = 1 << 3;
const DEPRECATE_AUTO_EOI: u32 = 1 << 9;
/// Leaf 0x80000007, EDX: the TSC runs at a constant rate.
const INVARIANT_TSC: u32 = 1 << 8;

const NO_NESTED: &str = "nested virtualization is off, because this host's KVM does not offer it: \
    load kvm_amd or kvm_intel with the option nested=1, and on a cloud VM, choose a type with \
    nested virtualization";

impl Model {
    /// The host's leaves, adapted to the machine.
    pub fn of_host(
        kvm: &Kvm,
        topology: Topology,
        hyperv: Option<Provider>,
        features: &Features,
    ) -> anyhow::Result<Self> {
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).context("CPUID")?;
        let hyperv = match hyperv {
            Some(Provider::Kvm) => kvm::hyperv_cpuid(kvm),
            Some(Provider::Own) => hyperv::leaves(topology.cpus.count),
            None => Vec::new(),
        };
        let invariant = std::fs::read_to_string("/proc/cpuinfo")
            .is_ok_and(|text| text.split_ascii_whitespace().any(|flag| flag == "nonstop_tsc"));
        let mut leaves = cpuid.as_slice().to_vec();
        with_host(&mut leaves, host_leaf);
        features::hide_shadow_stacks(&mut leaves);
        if let Some(level) = features.level {
            level::apply(&mut leaves, level)?;
        }
        if !features.nested {
            features::hide_nested(&mut leaves);
        } else if !is_nested(&leaves) {
            tracing::warn!("{}", NO_NESTED);
        }
        let mut model = Self::new(leaves, topology, &hyperv, invariant);
        features::apply(&mut model.leaves, features);
        Ok(model)
    }

    fn new(mut leaves: Vec<Leaf>, topology: Topology, hyperv: &[Leaf], invariant: bool) -> Self {
        let vendor = leaves.iter().find(|leaf| leaf.function == 0).map_or(0, |leaf| leaf.ebx);
        // "Auth" and "Hygo".
        let amd = [0x6874_7541, 0x6f67_7948].contains(&vendor);
        for leaf in &mut leaves {
            match leaf.function {
                1 => {
                    leaf.ecx |= TSC_DEADLINE | HYPERVISOR;
                    leaf.edx |= MTRR;
                }
                7 if amd && leaf.index == 0 => leaf.edx &= !ARCH_CAPABILITIES,
                0x8000_0007 if invariant => leaf.edx |= INVARIANT_TSC,
                _ => {}
            }
        }
        if amd && topology.cpus.threads > 1 {
            with_threads(&mut leaves);
        }
        // `of` rebuilds these leaves for each processor.
        leaves.retain(|leaf| ![0xb, 0x1f].contains(&leaf.function));
        if !hyperv.is_empty() {
            with_hyperv(&mut leaves, hyperv);
        }
        Self { leaves, topology, amd }
    }

    pub fn of(&self, index: u32) -> anyhow::Result<CpuId> {
        let mut leaves = self.leaves.clone();
        leaves.iter_mut().for_each(|leaf| self.set_position(leaf, index));
        let last = leaves.iter().find(|leaf| leaf.function == 0).map_or(0, |leaf| leaf.eax);
        for function in [0xb, 0x1f].into_iter().filter(|function| *function <= last) {
            leaves.extend(self.levels(function, index));
        }
        CpuId::from_entries(&leaves).context("CPUID")
    }

    fn set_position(&self, leaf: &mut Leaf, index: u32) {
        let topology = &self.topology;
        let id = topology.apic_id(index);
        let shift = topology.socket_shift();
        let (socket, core) = topology.location(index);
        let threads = topology.cpus.threads;
        let many = topology.per_socket() > 1;
        match leaf.function {
            1 => {
                let logical = (1_u32 << shift.min(7)).min(255);
                leaf.ebx = leaf.ebx & 0xffff | id << 24 | logical << 16;
                leaf.edx = if many { leaf.edx | HTT } else { leaf.edx & !HTT };
            }
            4 if leaf.eax & 0x1f != 0 => {
                let cores = (1 << topology.core_bits) - 1;
                leaf.eax = leaf.eax & 0x3fff | sharing(leaf, topology) << 14 | cores << 26;
            }
            0x8000_0001 if self.amd => {
                leaf.ecx &= !CMP_LEGACY;
                leaf.ecx |= if many { CMP_LEGACY } else { 0 };
                if leaf.ecx & TOPOLOGY_EXTENSIONS == 0 {
                    leaf.ecx &= !PERFCTR_CORE;
                }
            }
            0x8000_0008 if self.amd => {
                leaf.ecx = leaf.ecx & !0xf0ff | (topology.per_socket() - 1) & 0xff | shift << 12;
            }
            0x8000_001d if self.amd && leaf.eax & 0x1f != 0 => {
                leaf.eax = leaf.eax & 0x3fff | sharing(leaf, topology) << 14;
            }
            0x8000_001e if self.amd => {
                leaf.eax = id;
                leaf.ebx = core & 0xff | (threads - 1) << 8;
                leaf.ecx = socket & 0xff;
            }
            _ => {}
        }
    }

    /// Leaves 0xB and 0x1F: the levels thread and core, and the end of the list.
    fn levels(&self, function: u32, index: u32) -> [Leaf; 3] {
        let topology = &self.topology;
        let level = |number: u32, shift, count, kind: u32| Leaf {
            function,
            index: number,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: count,
            ecx: number | kind << 8,
            edx: topology.apic_id(index),
            ..Default::default()
        };
        [
            level(0, topology.thread_bits, topology.cpus.threads, 1),
            level(1, topology.socket_shift(), topology.per_socket(), 2),
            level(2, 0, 0, 0),
        ]
    }

    /// Whether the guest can run virtual machines with Intel's extension.
    pub fn has_vmx(&self) -> bool {
        features::has_vmx(&self.leaves)
    }

    /// The width of guest-physical addresses, in bits.
    pub fn physical_bits(&self) -> u8 {
        let leaf = self.leaves.iter().find(|leaf| leaf.function == 0x8000_0008);
        leaf.map_or(36, |leaf| leaf.eax.to_le_bytes()[0])
    }

    /// Family, model and stepping as SMBIOS stores them: leaf 1's EAX and EDX.
    pub fn signature(&self) -> u64 {
        let leaf = self.leaves.iter().find(|leaf| leaf.function == 1);
        leaf.map_or(0, |leaf| u64::from(leaf.edx) << 32 | u64::from(leaf.eax))
    }

    /// The vendor and the brand string of the processor.
    pub fn names(&self) -> (String, String) {
        let text = |function, order: [usize; 4], count| {
            let leaf = self.leaves.iter().find(|leaf| leaf.function == function);
            let leaf = leaf.map_or([0; 4], |leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
            let bytes: Vec<u8> =
                order[..count].iter().flat_map(|register| leaf[*register].to_le_bytes()).collect();
            String::from_utf8_lossy(&bytes).replace('\0', "")
        };
        let brand = (0x8000_0002..=0x8000_0004).map(|leaf| text(leaf, [0, 1, 2, 3], 4));
        (text(0, [1, 3, 2, 0], 3), brand.collect::<String>().trim().to_owned())
    }
}

/// The number of APIC IDs that share a cache, minus one. A last-level cache belongs to a socket,
/// others to a core.
fn sharing(leaf: &Leaf, topology: &Topology) -> u32 {
    let level = leaf.eax >> 5 & 7;
    let bits = if level >= 3 { topology.socket_shift() } else { topology.thread_bits };
    (1 << bits) - 1
}

fn host_leaf(function: u32) -> Leaf {
    let CpuidResult { eax, ebx, ecx, edx } = __cpuid(function);
    Leaf { function, eax, ebx, ecx, edx, ..Default::default() }
}

/// Copies leaves from the host that describe no feature and that KVM leaves empty: the processor's
/// name, and AMD's first-level caches and TLBs, by which systems size their tables.
fn with_host(leaves: &mut Vec<Leaf>, host: fn(u32) -> Leaf) {
    let last = leaves.iter().find(|leaf| leaf.function == 0x8000_0000).map_or(0, |leaf| leaf.eax);
    for function in (0x8000_0002..=0x8000_0005).filter(|function| *function <= last) {
        let empty = |leaf: &&Leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx] == [0; 4];
        let known = leaves.iter().filter(|leaf| leaf.function == function);
        if known.clone().count() == known.filter(empty).count() {
            leaves.retain(|leaf| leaf.function != function);
            leaves.push(host(function));
        }
    }
}

/// Announces leaf 0x8000001E, also if the host's own processor has no threads. AMD guests look for
/// threads in this leaf, and Linux before 6.9 looks in leaf 0xB only if this one is announced.
fn with_threads(leaves: &mut Vec<Leaf>) {
    const THREADS: u32 = 0x8000_001e;
    for leaf in leaves.iter_mut() {
        match leaf.function {
            0x8000_0000 => leaf.eax = leaf.eax.max(THREADS),
            0x8000_0001 => leaf.ecx |= TOPOLOGY_EXTENSIONS,
            _ => {}
        }
    }
    if !leaves.iter().any(|leaf| leaf.function == THREADS) {
        leaves.push(Leaf { function: THREADS, ..Default::default() });
    }
}

/// Puts Hyper-V's leaves ("Microsoft Hv") at 0x40000000, and moves KVM's own leaves after them.
fn with_hyperv(leaves: &mut Vec<Leaf>, hyperv: &[Leaf]) {
    const BASE: u32 = 0x4000_0000;
    const KVM: u32 = 0x4000_0100;
    for leaf in leaves.iter_mut().filter(|leaf| (BASE..=BASE + 1).contains(&leaf.function)) {
        if leaf.function == BASE {
            leaf.eax = KVM + 1;
        }
        leaf.function += KVM - BASE;
    }
    // KVM's synthetic debugger is not used, and its nested features (enlightened VMCS) neither.
    let wanted = hyperv.iter().filter(|leaf| leaf.function <= BASE + 5);
    for mut leaf in wanted.copied() {
        match leaf.function {
            BASE => {
                // Windows checks only leaf 1; Linux checks the signature "Microsoft Hv".
                leaf.eax = BASE + 5;
                [leaf.ebx, leaf.ecx, leaf.edx] = [0x7263_694d, 0x666f_736f, 0x7648_2074];
            }
            0x4000_0003 => {
                // Debug, guest idle, nested and reenlightenment privileges need features that this
                // machine lacks; so does crash reporting by message. Hypercalls and the VP index
                // stay: without them, Windows never uses the reference TSC.
                leaf.eax &= 0b1010_0111_1111;
                leaf.ebx = 0;
                leaf.edx &= 1 << 4 | 1 << 8 | 1 << 10 | 1 << 14 | 1 << 19;
            }
            0x4000_0004 => {
                // Relaxed timing, and no nested flushes. With "deprecate AutoEOI" (bit 9), KVM can
                // use hardware APIC acceleration. Access by MSR (bit 3) would then exit, while
                // accelerated access does not.
                leaf.eax = leaf.eax & !(1 << 14) | 1 << 5;
                if leaf.eax & DEPRECATE_AUTO_EOI != 0 {
                    leaf.eax &= !APIC_BY_MSR;
                }
                // The number of spinlock retries before a guest notifies the hypervisor, if the
                // hypervisor can be notified at all.
                if leaf.ebx != hyperv::NEVER_NOTIFY {
                    leaf.ebx = 0xfff;
                }
            }
            _ => {}
        }
        leaves.push(leaf);
    }
}

/// Leaves whose bits are features: number, subleaf, and the registers: bit 0 is EAX, bit 3 EDX.
const FEATURES: &[(u32, u32, u8)] = &[
    (1, 0, 0b1100),
    (6, 0, 0b0001),
    (7, 0, 0b1110),
    (7, 1, 0b1111),
    (7, 2, 0b1000),
    (0xd, 0, 0b1001),
    (0xd, 1, 0b1101),
    (0x4000_0001, 0, 0b0001),
    (0x4000_0003, 0, 0b1011),
    (0x4000_0004, 0, 0b0001),
    (0x4000_0101, 0, 0b0001),
    (0x8000_0001, 0, 0b1100),
    (0x8000_0007, 0, 0b1000),
    (0x8000_0008, 0, 0b0010),
    (0x8000_000a, 0, 0b1000),
    (0x8000_0021, 0, 0b0001),
];

/// Numbers that may not shrink: leaf, register, lowest bit, width in bits. Version, number and
/// width of the performance counters; widths of addresses.
const NUMBERS: &[(u32, usize, u32, u32)] = &[
    (0xa, 0, 0, 8),
    (0xa, 0, 8, 8),
    (0xa, 0, 16, 8),
    (0xa, 3, 0, 5),
    (0xa, 3, 5, 8),
    (0x8000_0008, 0, 0, 8),
    (0x8000_0008, 0, 8, 8),
];

const REGISTERS: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];

/// The registers of a leaf, which are zero if there is none.
fn registers(all: &[Leaf], function: u32, index: u32) -> [u32; 4] {
    let leaf = all.iter().find(|it| it.function == function && it.index == index);
    leaf.map_or([0; 4], |it| [it.eax, it.ebx, it.ecx, it.edx])
}

fn clear(leaf: &mut Leaf) {
    (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx) = (0, 0, 0, 0);
}

/// Fails if a processor that offers `ours` lacks a feature of the snapshot's.
pub fn check(saved: &[Leaf], ours: &[Leaf]) -> anyhow::Result<()> {
    let vendor = |all| registers(all, 0, 0)[1..].to_vec();
    anyhow::ensure!(
        vendor(saved) == vendor(ours),
        "the snapshot is of a processor of another vendor: restore it on a host with a processor \
         like the one that it had"
    );
    for (function, index, compared) in FEATURES {
        let [saved, ours] = [saved, ours].map(|all| registers(all, *function, *index));
        for at in (0..4).filter(|at| compared >> at & 1 == 1) {
            let lacks = saved[at] & !ours[at];
            anyhow::ensure!(
                lacks == 0,
                "this host's processor lacks features that the guest uses (CPUID leaf \
                 {function:#x}, subleaf {index}, {}: {lacks:#x}): restore it on a host with a \
                 processor like the one that it had",
                REGISTERS[at]
            );
        }
    }
    for (function, register, bit, width) in NUMBERS {
        let number = |all| registers(all, *function, 0)[*register] >> bit & ((1 << width) - 1);
        let (saved, ours) = (number(saved), number(ours));
        anyhow::ensure!(
            saved <= ours,
            "this host's processor has less than the guest uses (CPUID leaf {function:#x}, {}, bit \
             {bit}: {ours} instead of {saved}): restore it on a host with a processor like the one \
             that it had",
            REGISTERS[*register]
        );
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    fn topology(count: u32, sockets: u32, threads: u32) -> Topology {
        let cpus = Cpus { count, sockets, cores: 0, threads };
        Topology::new(cpus.settle(4096).unwrap())
    }

    fn leaf(function: u32, index: u32, eax: u32) -> Leaf {
        Leaf { function, index, eax, ..Default::default() }
    }

    fn find(cpuid: &CpuId, function: u32, index: u32) -> Leaf {
        let found = cpuid.as_slice().iter().find(|l| l.function == function && l.index == index);
        *found.unwrap()
    }

    #[test]
    fn a_snapshot_needs_the_vendor_and_the_features_that_it_has() {
        let leaf = |function, ebx, ecx| Leaf { function, ebx, ecx, ..Default::default() };
        let saved = [leaf(0, 1, 2), leaf(1, 5, 0b110)];
        let error = |ours: &[Leaf]| check(&saved, ours).err().map(|it| it.to_string());
        assert_eq!(error(&saved), None);
        assert_eq!(error(&[leaf(0, 1, 2), leaf(1, 9, 0b111)]), None, "more is enough");
        let wide = Leaf { function: 0x8000_0008, eax: 0x302e, ..Default::default() };
        for (width, enough) in [(0x392e, true), (0x302f, true), (0x302d, false), (0x2f30, false)] {
            let ours = Leaf { eax: width, ..wide };
            assert_eq!(check(&[wide], &[ours]).is_ok(), enough, "{width:#x}");
        }
        let less = error(&[leaf(0, 1, 2), leaf(1, 5, 0b010)]).unwrap();
        assert!(less.contains("leaf 0x1, subleaf 0, ECX: 0x4"), "{less}");
        assert!(error(&[leaf(0, 1, 3), leaf(1, 5, 0b110)]).unwrap().contains("another vendor"));
    }

    #[test]
    fn apic_ids_have_whole_bits_for_threads_and_cores() {
        let ids = |t: Topology| (0..t.cpus.count).map(|i| t.apic_id(i)).collect::<Vec<_>>();
        assert_eq!(ids(topology(5, 1, 1)), [0, 1, 2, 3, 4]);
        assert_eq!(ids(topology(6, 2, 1)), [0, 1, 2, 4, 5, 6]);
        assert_eq!(ids(topology(8, 2, 2)), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(ids(topology(6, 1, 2)), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn all_topology_leaves_agree() {
        let mut amd = leaf(0, 0, 0x1f);
        amd.ebx = 0x6874_7541;
        let leaves = vec![
            amd,
            leaf(1, 0, 0),
            leaf(4, 0, 1 | 1 << 5),
            leaf(4, 3, 3 | 3 << 5),
            leaf(0x8000_0001, 0, 0),
            leaf(0x8000_0008, 0, 0x3028),
            leaf(0x8000_001d, 3, 3 | 3 << 5),
            leaf(0x8000_001e, 0, 0),
        ];
        let model = Model::new(leaves, topology(12, 2, 2), &[], true);
        assert_eq!(model.physical_bits(), 40);
        let cpuid = model.of(9).unwrap();
        // Socket 1, core 1, thread 1 of 2 sockets, 3 cores, 2 threads: 1 | 01 | 1.
        let id = 0b1011;
        let one = find(&cpuid, 1, 0);
        assert_eq!((one.ebx >> 24, one.ebx >> 16 & 0xff), (id, 8));
        assert_eq!(one.edx & HTT, HTT);
        assert_eq!(one.ecx & HYPERVISOR, HYPERVISOR);
        for function in [0xb, 0x1f] {
            let threads = find(&cpuid, function, 0);
            assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (1, 2, 0x100, id));
            let cores = find(&cpuid, function, 1);
            assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (3, 6, 0x201, id));
        }
        assert_eq!(find(&cpuid, 4, 0).eax >> 14 & 0xfff, 1, "a core's two threads share it");
        assert_eq!(find(&cpuid, 4, 3).eax >> 14 & 0xfff, 7, "all of a socket share it");
        assert_eq!(find(&cpuid, 0x8000_0008, 0).ecx, 5 | 3 << 12);
        let extended = find(&cpuid, 0x8000_001e, 0);
        assert_eq!((extended.eax, extended.ebx, extended.ecx), (id, 1 | 1 << 8, 1));
    }

    #[test]
    fn threads_are_announced_to_amd_guests() {
        let mut amd = leaf(0, 0, 0xd);
        amd.ebx = 0x6874_7541;
        let old = vec![amd, leaf(0x8000_0000, 0, 0x8000_000a), leaf(0x8000_0001, 0, 0)];
        let model = Model::new(old.clone(), topology(8, 2, 2), &[], false);
        let cpuid = model.of(5).unwrap();
        assert_eq!(find(&cpuid, 0x8000_0000, 0).eax, 0x8000_001e);
        assert_ne!(find(&cpuid, 0x8000_0001, 0).ecx & TOPOLOGY_EXTENSIONS, 0);
        let threads = find(&cpuid, 0x8000_001e, 0);
        assert_eq!((threads.eax, threads.ebx, threads.ecx), (5, 1 << 8, 1));
        let model = Model::new(old, topology(8, 2, 1), &[], false);
        assert_eq!(find(&model.of(5).unwrap(), 0x8000_0000, 0).eax, 0x8000_000a);
    }

    #[test]
    fn names_and_caches_missing_in_kvm_come_from_the_host() {
        let host = |function| leaf(function, 0, 0x6e75_7453);
        let mut leaves = vec![leaf(0x8000_0000, 0, 0x8000_0005), leaf(0x8000_0002, 0, 0)];
        leaves.push(leaf(0x8000_0005, 0, 5));
        with_host(&mut leaves, host);
        let model = Model::new(leaves, topology(1, 1, 1), &[], false);
        assert_eq!(model.names().1, "StunStunStun");
        let cpuid = model.of(0).unwrap();
        assert_eq!(find(&cpuid, 0x8000_0005, 0).eax, 5, "KVM knows better");
        let mut none = vec![leaf(0x8000_0000, 0, 0x8000_0001)];
        with_host(&mut none, host);
        assert_eq!(none.len(), 1);
    }

    #[test]
    fn hyperv_leaves_come_first_and_kvm_leaves_move_up() {
        let hyperv = [
            leaf(0x4000_0000, 0, 0x4000_0082),
            leaf(0x4000_0003, 0, u32::MAX),
            leaf(0x4000_0004, 0, 1 << 3 | 1 << 9),
            leaf(0x4000_0080, 0, 1),
        ];
        let kvm = vec![leaf(0, 0, 0xd), leaf(0x4000_0000, 0, 0x4000_0001), leaf(0x4000_0001, 0, 7)];
        let model = Model::new(kvm, topology(1, 1, 1), &hyperv, false);
        let cpuid = model.of(0).unwrap();
        assert_eq!(find(&cpuid, 0x4000_0000, 0).eax, 0x4000_0005);
        assert_eq!(find(&cpuid, 0x4000_0003, 0).eax & 0b110_0000, 0b110_0000);
        let recommended = find(&cpuid, 0x4000_0004, 0).eax;
        assert_eq!(recommended & (1 << 3 | 1 << 5 | 1 << 9), 1 << 5 | 1 << 9, "no APIC by MSR");
        assert_eq!(find(&cpuid, 0x4000_0100, 0).eax, 0x4000_0101);
        assert_eq!(find(&cpuid, 0x4000_0101, 0).eax, 7);
        assert!(!cpuid.as_slice().iter().any(|leaf| leaf.function == 0x4000_0080));
    }
}
