//! Hyper-V's clocks and crash reports without KVM's help, which work on every KVM.

use transom_tests::enlightened::{Enlightened, Provider, agrees_across_a_pause, is_clean_after};

use crate::runs_here;

#[test]
fn hyperv_without_kvm_works_with_few_and_many_processors() {
    if !runs_here("hyperv_without_kvm_works_with_few_and_many_processors") {
        return;
    }
    for processors in [1, 2, 4, 64] {
        let it = Enlightened::start(Provider::Own, processors, "hyperv=1 then=halt");
        let mut it = it.expect("a machine");
        it.runs(1).expect("all checks pass");
        it.end().expect("an end, and the report of a crash");
    }
}

#[test]
fn hyperv_without_kvm_agrees_across_a_pause_and_is_clean_after_a_reset() {
    if !runs_here("hyperv_without_kvm_agrees_across_a_pause_and_is_clean_after_a_reset") {
        return;
    }
    agrees_across_a_pause(Provider::Own, 2).expect("the same time");
    for reset in ["acpi", "keyboard", "triple", "reset", "halt"] {
        is_clean_after(Provider::Own, 2, reset).expect(reset);
    }
}
