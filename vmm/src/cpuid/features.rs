//! Features that are hidden from the guest, or shown only on request.

use kvm_bindings::kvm_cpuid_entry2 as Leaf;

use super::{APIC_BY_MSR, DEPRECATE_AUTO_EOI, HYPERVISOR, clear};
use crate::config::{Features, Hide};

/// Leaf 1, ECX, and leaf 0x80000001, ECX: nested virtualization. Windows starts its own hypervisor
/// when it sees these bits, and is slower or does not boot.
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;

/// Leaf 7, ECX: shadow stacks. Their pointer (SSP) is in no register list of KVM, so that neither a
/// reset nor a snapshot could set it.
const SHADOW_STACKS: u32 = 1 << 7;
/// Leaf 7, EDX: tracking of indirect branches, whose registers are MSRs.
const BRANCH_TRACKING: u32 = 1 << 20;
/// Leaf 0xD, subleaf 1, ECX: the parts of XSAVES for both.
const CONTROL_FLOW: u32 = 0b11 << 11;

/// Whether the processor can run virtual machines.
pub(crate) fn is_nested(leaves: &[Leaf]) -> bool {
    leaves.iter().any(|leaf| match leaf.function {
        1 => leaf.ecx & VMX != 0,
        0x8000_0001 => leaf.ecx & SVM != 0,
        _ => false,
    })
}

/// Whether it can do so with Intel's extension.
pub(super) fn has_vmx(leaves: &[Leaf]) -> bool {
    leaves.iter().any(|leaf| leaf.function == 1 && leaf.ecx & VMX != 0)
}

pub(super) fn hide_nested(leaves: &mut [Leaf]) {
    for leaf in leaves {
        match leaf.function {
            1 => leaf.ecx &= !VMX,
            0x8000_0001 => leaf.ecx &= !SVM,
            // The features of nested SVM.
            0x8000_000a => clear(leaf),
            _ => {}
        }
    }
}

pub(super) fn hide_shadow_stacks(leaves: &mut [Leaf]) {
    let features = |leaf: &Leaf| (leaf.function, leaf.index) == (7, 0);
    let tracks = leaves.iter().any(|leaf| features(leaf) && leaf.edx & BRANCH_TRACKING != 0);
    for leaf in leaves {
        match (leaf.function, leaf.index) {
            (7, 0) => leaf.ecx &= !SHADOW_STACKS,
            (0xd, 1) if !tracks => leaf.ecx &= !CONTROL_FLOW,
            (0xd, 11..=12) if !tracks => clear(leaf),
            _ => {}
        }
    }
}

/// Hides features of the hypervisor. Nested virtualization is the caller's.
pub(super) fn apply(leaves: &mut Vec<Leaf>, features: &Features) {
    const HYPERVISORS: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_ffff;
    let hyperv = leaves.iter().any(|leaf| (leaf.function, leaf.eax) == (0x4000_0001, HV_1));
    if features.hides(Hide::Kvm) {
        let kvm = if hyperv { 0x4000_0100 } else { 0x4000_0000 };
        leaves.retain(|leaf| !HYPERVISORS.contains(&leaf.function) || leaf.function < kvm);
    }
    for leaf in leaves {
        match leaf.function {
            1 if features.hides(Hide::Hypervisor) => leaf.ecx &= !HYPERVISOR,
            0x4000_0000 if hyperv => {
                if let Some(vendor) = &features.hv_vendor {
                    [leaf.ebx, leaf.ecx, leaf.edx] = vendor.registers();
                }
            }
            0x4000_0003 | 0x4000_0004 if hyperv => hide_enlightenments(leaf, features),
            _ => {}
        }
    }
}

/// "Hv#1", the interface of Hyper-V.
const HV_1: u32 = 0x3123_7648;

/// Leaves 0x40000003 and 0x40000004 (TLFS 2.4.4, 2.4.5).
fn hide_enlightenments(leaf: &mut Leaf, features: &Features) {
    for (_, feature) in Hide::ALL.iter().filter(|(_, feature)| features.hides(*feature)) {
        let (privileges, more, advice) = bits(*feature);
        if leaf.function == 0x4000_0003 {
            leaf.eax &= !privileges;
            leaf.edx &= !more;
        } else {
            leaf.eax &= !advice;
            if *feature == Hide::HvSpinlocks {
                // Never notify the hypervisor.
                leaf.ebx = u32::MAX;
            }
        }
    }
}

/// The bits of leaf 0x40000003's EAX and EDX, and of leaf 0x40000004's EAX.
fn bits(feature: Hide) -> (u32, u32, u32) {
    match feature {
        Hide::Kvm | Hide::Hypervisor | Hide::HvSpinlocks => (0, 0, 0),
        Hide::HvRelaxed => (0, 0, 1 << 5),
        Hide::HvVapic => (1 << 4, 0, APIC_BY_MSR),
        Hide::HvTime => (1 << 1 | 1 << 9, 0, 0),
        Hide::HvCrash => (0, 1 << 10, 0),
        Hide::HvVpindex => (1 << 6, 0, 0),
        Hide::HvRuntime => (1, 0, 0),
        Hide::HvSynic => (1 << 2, 0, 0),
        Hide::HvStimer => (1 << 3, 1 << 19, 0),
        Hide::HvStimerDirect => (0, 1 << 19, 0),
        Hide::HvFrequencies => (1 << 11, 1 << 8, 0),
        Hide::HvTlbflush => (0, 1 << 14, 1 << 2),
        Hide::HvTlbflushExt => (0, 1 << 14, 0),
        Hide::HvIpi => (0, 0, 1 << 10),
        Hide::HvXmmInput => (0, 1 << 4, 0),
        Hide::HvAvic => (0, 0, DEPRECATE_AUTO_EOI),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::config::{Hidden, Vendor};

    fn leaf(function: u32, eax: u32) -> Leaf {
        Leaf { function, eax, ebx: 1, ecx: u32::MAX, edx: u32::MAX, ..Default::default() }
    }

    fn find(leaves: &[Leaf], function: u32) -> Option<Leaf> {
        leaves.iter().copied().find(|leaf| leaf.function == function)
    }

    fn without(hidden: &[Hide]) -> Features {
        Features { without: Some(Hidden(hidden.to_vec())), ..Features::default() }
    }

    #[test]
    fn shadow_stacks_are_hidden_and_branch_tracking_keeps_its_state() {
        for (tracking, left) in [(0, !CONTROL_FLOW), (BRANCH_TRACKING, u32::MAX)] {
            let mut leaves =
                [(7, 0), (0xd, 1), (0xd, 11)].map(|it| Leaf { index: it.1, ..leaf(it.0, 8) });
            leaves[0].edx = tracking;
            hide_shadow_stacks(&mut leaves);
            assert_eq!((leaves[0].ecx, leaves[0].edx), (!SHADOW_STACKS, tracking));
            assert_eq!(leaves[1].ecx, left);
            assert_eq!(leaves[2].eax, if tracking == 0 { 0 } else { 8 });
        }
    }

    fn with_hyperv() -> Vec<Leaf> {
        vec![
            leaf(1, 0),
            leaf(0x4000_0000, 0x4000_0005),
            leaf(0x4000_0001, HV_1),
            leaf(0x4000_0003, u32::MAX),
            leaf(0x4000_0004, u32::MAX),
            leaf(0x4000_0100, 0x4000_0101),
            leaf(0x4000_0101, 7),
            leaf(0x8000_0000, 0),
        ]
    }

    #[test]
    fn a_hidden_kvm_has_no_leaves_with_and_without_hyperv() {
        let mut leaves = with_hyperv();
        apply(&mut leaves, &without(&[Hide::Kvm]));
        assert!(find(&leaves, 0x4000_0100).is_none() && find(&leaves, 0x4000_0101).is_none());
        assert!(find(&leaves, 0x4000_0004).is_some() && find(&leaves, 0x8000_0000).is_some());
        let mut alone = vec![leaf(1, 0), leaf(0x4000_0000, 0), leaf(0x4000_0001, 7)];
        apply(&mut alone, &without(&[Hide::Kvm]));
        assert_eq!(alone.len(), 1);
        assert_ne!(alone[0].ecx & HYPERVISOR, 0, "the bit is another feature");
    }

    #[test]
    fn a_hidden_hypervisor_keeps_its_leaves_and_loses_its_bit() {
        let mut leaves = with_hyperv();
        apply(&mut leaves, &without(&[Hide::Hypervisor]));
        assert_eq!(find(&leaves, 1).unwrap().ecx, !HYPERVISOR);
        assert_eq!(leaves.len(), with_hyperv().len());
    }

    #[test]
    fn each_enlightenment_is_hidden_alone() {
        for (word, feature) in Hide::ALL.iter().filter(|(word, _)| word.starts_with("hv-")) {
            let mut leaves = with_hyperv();
            apply(&mut leaves, &without(&[*feature]));
            let [three, four] = [0x4000_0003, 0x4000_0004].map(|it| find(&leaves, it).unwrap());
            let (privileges, more, advice) = bits(*feature);
            assert_eq!((three.eax, three.edx, four.eax), (!privileges, !more, !advice), "{word}");
            let spins = if *feature == Hide::HvSpinlocks { u32::MAX } else { 1 };
            assert_eq!(four.ebx, spins, "{word}");
        }
    }

    #[test]
    fn a_vendor_is_that_of_hyperv_alone() {
        let vendor = Vendor::try_from("Generic".to_owned()).unwrap();
        let features = Features { hv_vendor: Some(vendor), ..Features::default() };
        let mut leaves = with_hyperv();
        apply(&mut leaves, &features);
        assert_eq!(find(&leaves, 0x4000_0000).unwrap().ebx.to_le_bytes(), *b"Gene");
        let mut kvm = vec![leaf(0x4000_0000, 0), leaf(0x4000_0001, 7)];
        apply(&mut kvm, &features);
        assert_eq!(kvm[0].ebx, 1, "without Hyper-V these leaves are KVM's");
    }

    #[test]
    fn without_nested_virtualization_no_leaf_announces_it() {
        let mut leaves = vec![leaf(1, 0), leaf(0x8000_0001, 0), leaf(0x8000_000a, 1)];
        assert!(is_nested(&leaves));
        hide_nested(&mut leaves);
        assert!(!is_nested(&leaves));
        assert_eq!(find(&leaves, 0x8000_000a).unwrap().eax, 0);
        let svm = [Leaf { function: 0x8000_0001, ecx: SVM, ..Default::default() }];
        assert!(is_nested(&svm) && !has_vmx(&svm));
        assert!(has_vmx(&[Leaf { function: 1, ecx: VMX, ..Default::default() }]));
    }
}
