//! The state that KVM has of a machine: all registers of a processor, the interrupt controllers,
//! the timer and the clock. It is taken and set for a reset and for a snapshot.

use std::ops::{Range, RangeInclusive};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{
    Msrs, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_pit_state2, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::fd;

/// The time stamp counter, and IA32_TSC_ADJUST, which shifts it. A reset keeps both.
const TSC: u32 = 0x10;
const TSC_ADJUST: u32 = 0x3b;

/// The interrupt request register (IRR) of the local controller.
const REQUESTS: Range<usize> = 0x200..0x280;

/// MSR_KVM_WALL_CLOCK and MSR_KVM_WALL_CLOCK_NEW.
const WALL_CLOCKS: [u32; 2] = [0x11, 0x4b56_4d00];
/// MSRs that change by themselves, or that are not restored: deadline of the local controller's
/// timer; time and counters of Hyper-V's interface; KVM's clocks.
const CHANGING: [u32; 8] =
    [0x6e0, 0x4000_0020, 0x4000_0010, 0x11, 0x12, 0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d02];
/// HV_X64_MSR_HYPERCALL.
const HYPERCALL: u32 = 0x4000_0001;

/// MSRs that KVM saves but does not list: MTRRs, and the pages, sources and timers of Hyper-V's
/// synthetic interrupt controller. Without resetting them, a timer of the previous guest would
/// write into the memory of the new one.
const UNLISTED: &[RangeInclusive<u32>] = &[
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
    0x4000_0082..=0x4000_0083,
    0x4000_0090..=0x4000_009f,
    0x4000_00b0..=0x4000_00b7,
];

/// The registers of a processor, without its time stamp counter.
#[derive(Serialize, Deserialize)]
pub struct Processor {
    pub(super) mode: kvm_mp_state,
    pub(super) regs: kvm_regs,
    pub(super) sregs: kvm_sregs,
    xsave: Box<kvm_xsave>,
    xcrs: Option<kvm_xcrs>,
    msrs: Vec<kvm_msr_entry>,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    debug: kvm_debugregs,
    /// Only with nested virtualization.
    nested: Option<Box<KvmNestedStateBuffer>>,
}

impl Processor {
    /// The state of a new processor.
    pub(super) fn new(kvm: &Kvm, fd: &VcpuFd, nested: bool) -> anyhow::Result<Self> {
        let list = kvm.get_msr_index_list().context("the list of MSRs")?;
        let listed = list.as_slice().iter().copied();
        let listed = listed.filter(|index| ![TSC, TSC_ADJUST].contains(index));
        let all = listed.chain(UNLISTED.iter().cloned().flatten());
        Self::take(fd, all, nested)
    }

    /// The state of a processor that is not running, with the same registers as `self`.
    pub(super) fn now(&self, fd: &VcpuFd) -> anyhow::Result<Self> {
        Self::take(fd, self.msrs.iter().map(|msr| msr.index), self.nested.is_some())
    }

    fn take(fd: &VcpuFd, msrs: impl Iterator<Item = u32>, nested: bool) -> anyhow::Result<Self> {
        // First these two: KVM now takes note of an INIT, a start-up interrupt and an SMI that the
        // processor has not taken, which changes registers.
        let mode = fd.get_mp_state().context("the state of a processor")?;
        let events = fd.get_vcpu_events().context("pending events")?;
        let nested = nested.then(|| {
            let mut state = Box::<KvmNestedStateBuffer>::default();
            fd.nested_state(&mut state).context("nested virtualization").map(|_| state)
        });
        Ok(Self {
            mode,
            regs: fd.get_regs().context("registers")?,
            sregs: fd.get_sregs().context("system registers")?,
            xsave: Box::new(fd.get_xsave().context("floating-point registers")?),
            xcrs: fd.get_xcrs().ok(),
            msrs: get_msrs(fd, msrs)?,
            lapic: fd.get_lapic().context("the local interrupt controller")?,
            events,
            debug: fd.get_debug_regs().context("debug registers")?,
            nested: nested.transpose()?,
        })
    }

    /// Adds the interrupts that have reached the local controller since.
    pub(super) fn add_interrupts(&mut self, fd: &VcpuFd) -> anyhow::Result<()> {
        let now = fd.get_lapic().context("the local interrupt controller")?;
        for (state, now) in self.lapic.regs[REQUESTS].iter_mut().zip(&now.regs[REQUESTS]) {
            *state |= now;
        }
        Ok(())
    }

    /// Gives a processor this state. Its time stamp counter keeps running.
    pub(super) fn set(&self, fd: &VcpuFd) -> anyhow::Result<()> {
        // KVM now takes note of an SMI that the processor has not taken. Otherwise it would take it
        // with this state, with a handler of another system.
        fd.get_vcpu_events().context("pending events")?;
        // A processor that runs a guest of the guest leaves it. Otherwise the registers would
        // become those of that guest.
        if let Some(nested) = &self.nested {
            fd.set_nested_state(nested).context("nested virtualization")?;
        }
        fd.set_regs(&self.regs).context("registers")?;
        if let Some(xcrs) = &self.xcrs {
            fd.set_xcrs(xcrs).context("extended control registers")?;
        }
        fd::set_xsave(fd, &self.xsave).context("floating-point registers")?;
        fd.set_sregs(&self.sregs).context("system registers")?;
        // The deadline of the local controller's timer, an MSR, is valid only in its mode.
        fd.set_lapic(&self.lapic).context("the local interrupt controller")?;
        self.set_msrs(fd)?;
        fd::renew_tsc_offset(fd);
        fd.set_mp_state(self.mode).context("the state of a processor")?;
        fd.set_vcpu_events(&self.events).context("pending events")?;
        fd.set_debug_regs(&self.debug).context("debug registers")
    }

    /// The MSRs that do not have the values of this state.
    pub(super) fn different_msrs(&self, fd: &VcpuFd) -> anyhow::Result<Vec<u32>> {
        let now = get_msrs(fd, self.msrs.iter().map(|msr| msr.index))?;
        let same = |msr: &&kvm_msr_entry| {
            let same = |it: &kvm_msr_entry| (it.index, it.data) == (msr.index, msr.data);
            now.iter().any(same) || CHANGING.contains(&msr.index)
        };
        let all = self.msrs.iter();
        Ok(all.filter(|msr| !same(msr)).map(|msr| msr.index).collect())
    }

    fn set_msrs(&self, fd: &VcpuFd) -> anyhow::Result<()> {
        // KVM takes no hypercall page from a guest without a name, and not even none: a page is
        // cleared before the name, and set after it.
        let rank = |msr: &kvm_msr_entry| match (msr.index, msr.data) {
            (HYPERCALL, 0) => 0,
            (HYPERCALL, _) => 2,
            _ => 1,
        };
        // KVM writes the time to the address of a wall clock at once, even to memory that the chip
        // set will hide from the guest. A guest sets the address whenever it wants the time.
        let writes = |msr: &kvm_msr_entry| WALL_CLOCKS.contains(&msr.index) && msr.data != 0;
        let mut ordered = self.msrs.clone();
        ordered.retain(|msr| !writes(msr));
        ordered.sort_by_key(rank);
        set_msrs(fd, &ordered)
    }
}

/// The time stamp counter of a processor.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Tsc {
    khz: u32,
    count: u64,
    adjust: u64,
    /// The number that KVM adds to the host's counter, if it tells that.
    offset: Option<u64>,
}

impl Tsc {
    pub(super) fn of(fd: &VcpuFd) -> anyhow::Result<Self> {
        Ok(Self {
            khz: tsc_khz(fd)?,
            count: tsc(fd)?,
            adjust: get_msr(fd, TSC_ADJUST).unwrap_or(0),
            offset: fd::tsc_offset(fd),
        })
    }

    /// Continues at this count. `first` is the counter of the first processor, before and now: the
    /// others keep their distance to it. `scales`: the host's processor can change the rate. KVM
    /// would otherwise take a higher one and let the counter jump.
    pub(super) fn set(
        &self,
        fd: &VcpuFd,
        first: Option<(Self, Self)>,
        scales: bool,
    ) -> anyhow::Result<()> {
        let khz = tsc_khz(fd)?;
        // KVM itself takes rates as equal within this tolerance, in millionths.
        if khz.abs_diff(self.khz) > self.khz / 4000 {
            ensure!(
                scales && fd.set_tsc_khz(self.khz).is_ok(),
                "the guest's time stamp counter runs at {} kHz, and this host, with {khz} kHz, \
                 cannot change the rate: restore it on a host with the same processor",
                self.khz
            );
        }
        set_msr(fd, TSC_ADJUST, self.adjust);
        let offsets = first.and_then(|(before, now)| Some((before.offset?, now.offset?)));
        match (self.offset, offsets) {
            (Some(own), Some((before, now))) => {
                let offset = now.wrapping_add(own.wrapping_sub(before));
                ensure!(fd::set_tsc_offset(fd, offset), "KVM refuses the time stamp counter");
            }
            _ => ensure!(set_msr(fd, TSC, self.count), "KVM refuses the time stamp counter"),
        }
        Ok(())
    }
}

/// The time stamp counter as the guest reads it.
pub(super) fn tsc(fd: &VcpuFd) -> anyhow::Result<u64> {
    get_msr(fd, TSC).context("KVM does not tell the time stamp counter")
}

/// The rate of the time stamp counter.
pub(super) fn tsc_khz(fd: &VcpuFd) -> anyhow::Result<u32> {
    fd.get_tsc_khz().context("the rate of the time stamp counter")
}

/// The interrupt controllers of the chip set, and the timer.
#[derive(Serialize, Deserialize)]
pub struct Chips {
    chips: Vec<kvm_irqchip>,
    pit: kvm_pit_state2,
}

impl Chips {
    pub(super) fn of(vm: &VmFd, ids: &[u32]) -> anyhow::Result<Self> {
        let chip = |id: &u32| {
            let mut chip = kvm_irqchip { chip_id: *id, ..Default::default() };
            vm.get_irqchip(&mut chip).context("interrupt controllers")?;
            Ok(chip)
        };
        let chips = ids.iter().map(chip).collect::<anyhow::Result<_>>()?;
        Ok(Self { chips, pit: vm.get_pit2().context("the timer")? })
    }

    pub(super) fn set(&self, vm: &VmFd) -> anyhow::Result<()> {
        for chip in &self.chips {
            vm.set_irqchip(chip).context("interrupt controllers")?;
        }
        vm.set_pit2(&self.pit).context("the timer")
    }
}

/// KVM's clock, on which Hyper-V's reference time depends, too, and the time stamp counter of the
/// first processor at the same moment.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Clock {
    nanoseconds: u64,
    tsc: u64,
}

/// Readings of both clocks. The closest is taken, because the host may interrupt one.
const READINGS: usize = 8;

impl Clock {
    /// Reads both clocks, and this process's at the same moment.
    pub(super) fn of(vm: &VmFd, first: &VcpuFd) -> anyhow::Result<(Self, Instant)> {
        let clock = || anyhow::Ok(vm.get_clock().context("KVM's clock")?.clock);
        let mut best: Option<(u64, Self, Instant)> = None;
        for _ in 0..READINGS {
            let before = clock()?;
            let tsc = tsc(first)?;
            let at = Instant::now();
            let between = clock()?.saturating_sub(before);
            if best.is_none_or(|(shortest, ..)| between < shortest) {
                let nanoseconds = before + between / 2;
                best = Some((between, Self { nanoseconds, tsc }, at));
            }
        }
        best.map(|(_, clock, at)| (clock, at)).context("no reading of KVM's clock")
    }

    /// Lets both clocks go on from here: a guest does not notice the time in between. Returns the
    /// moment at which they were here. The processors must have their time stamp counters.
    pub(super) fn set(self, vm: &VmFd, vcpus: &[&VcpuFd]) -> anyhow::Result<Instant> {
        let first = vcpus.first().context("a machine without processors")?;
        let clock = kvm_clock_data { clock: self.nanoseconds, ..Default::default() };
        vm.set_clock(&clock).context("KVM's clock")?;
        let (now, at) = Self::of(vm, first)?;
        let passed = now.nanoseconds.saturating_sub(self.nanoseconds);
        let khz = tsc_khz(first)?;
        let counts = u128::from(passed) * u128::from(khz) / 1_000_000;
        let wanted = self.tsc.wrapping_add(u64::try_from(counts)?);
        for vcpu in vcpus {
            if let Some(offset) = fd::tsc_offset(vcpu) {
                let offset = offset.wrapping_add(wanted.wrapping_sub(now.tsc));
                ensure!(fd::set_tsc_offset(vcpu, offset), "KVM refuses the time stamp counter");
            }
        }
        Ok(at.checked_sub(Duration::from_nanos(passed)).unwrap_or(at))
    }
}

/// Reads these MSRs, as far as the processor has them.
fn get_msrs(fd: &VcpuFd, wanted: impl Iterator<Item = u32>) -> anyhow::Result<Vec<kvm_msr_entry>> {
    let mut wanted: Vec<_> =
        wanted.map(|index| kvm_msr_entry { index, ..Default::default() }).collect();
    let mut known: Vec<kvm_msr_entry> = Vec::new();
    // KVM stops at the first MSR that this processor does not have.
    while !wanted.is_empty() {
        let mut batch = Msrs::from_entries(&wanted).context("a list of MSRs")?;
        let count = fd.get_msrs(&mut batch).context("MSRs")?;
        known.extend(&batch.as_slice()[..count]);
        wanted.drain(..(count + 1).min(wanted.len()));
    }
    Ok(known)
}

/// Writes many MSRs. KVM stops at each one that refuses its value; the loop continues after it.
fn set_msrs(fd: &VcpuFd, mut msrs: &[kvm_msr_entry]) -> anyhow::Result<()> {
    while !msrs.is_empty() {
        let batch = Msrs::from_entries(msrs).context("a list of MSRs")?;
        let count = fd.set_msrs(&batch).context("MSRs")?;
        if let Some(refused) = msrs.get(count) {
            tracing::trace!("MSR {:#x} does not take {:#x}", refused.index, refused.data);
        }
        msrs = msrs.get(count + 1..).unwrap_or_default();
    }
    Ok(())
}

/// Writes an MSR. If the processor does not have it or refuses the value, it stays unchanged.
/// Returns whether it was written.
pub(super) fn set_msr(fd: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let written = Msrs::from_entries(&[entry]).map(|msrs| fd.set_msrs(&msrs));
    let done = matches!(written, Ok(Ok(1)));
    if !done {
        tracing::trace!("MSR {index:#x} does not take {data:#x}");
    }
    done
}

pub(super) fn get_msr(fd: &VcpuFd, index: u32) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    (fd.get_msrs(&mut msrs) == Ok(1)).then(|| msrs.as_slice()[0].data)
}
