//! Hyper-V's interface for Windows: KVM's, and our own for hosts whose KVM has none. The built-in
//! guest uses all of it, with few and many processors, across pauses and resets.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use transom_tests::enlightened::{Enlightened, Provider, agrees_across_a_pause, is_clean_after};
use transom_tests::lab::Lab;
use transom_tests::rebalance::keeps_working;
use transom_tests::suite::{Suite, Test};

/// ACPI's register, the keyboard controller, a triple fault, port 0xCF9, and `vmm ctl reset`.
const RESETS: [&str; 5] = ["acpi", "keyboard", "triple", "reset", "halt"];
/// Numbers of processors and resets that run with KVM's interface by default. The others run with
/// ours.
const ON_KVM: [&str; 5] = ["1", "64", "acpi", "triple", "halt"];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for provider in [Provider::Kvm, Provider::Own] {
        let named = move |says: String, body: fn(Provider, &str) -> anyhow::Result<()>, word| {
            let name = format!("hyperv_{}_{says}", provider.word());
            Test::new(name, move || body(provider, word))
        };
        let alternate =
            |test: Test, word| match ON_KVM.contains(&word) == (provider == Provider::Kvm) {
                true => test,
                false => test.thorough(),
            };
        for count in ["1", "2", "4", "64"] {
            let test = named(format!("works_with_{count}_processors"), works, count);
            tests.push(alternate(test, count));
        }
        tests.push(named("agrees_across_a_pause".into(), pause, "2"));
        for reset in RESETS {
            tests.push(alternate(named(format!("is_clean_after_{reset}"), clean, reset), reset));
            let name = format!("is_clean_after_{reset}_with_other_numbers_of_processors");
            tests.push(named(name, clean_with_others, reset).thorough());
        }
    }
    // Here KVM maps the display, and doorbells need no emulation of the guest's write.
    tests
        .push(Test::new("devices_work_while_their_bars_move_over_each_other", || keeps_working(9)));
    Suite { lab: Lab { mib: 2048, seconds: 900, assets: &[] }, tests }.main()
}

fn works(provider: Provider, processors: &str) -> anyhow::Result<()> {
    let mut it = Enlightened::start(provider, processors.parse()?, "hyperv=2 then=halt")?;
    it.runs(1)?;
    it.end()
}

fn pause(provider: Provider, processors: &str) -> anyhow::Result<()> {
    agrees_across_a_pause(provider, processors.parse()?)
}

fn clean(provider: Provider, reset: &str) -> anyhow::Result<()> {
    is_clean_after(provider, 2, reset)
}

fn clean_with_others(provider: Provider, reset: &str) -> anyhow::Result<()> {
    [1, 4, 64].iter().try_for_each(|&processors| {
        is_clean_after(provider, processors, reset).with_context(|| format!("{processors}"))
    })
}
