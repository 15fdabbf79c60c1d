//! The virtual machine: memory slots, interrupt controllers, and the resources it provides to
//! devices.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use anyhow::Context;
use devices::device::Kind;
use devices::hypervisor::{self, Backing, Doorbell, GuestAccess, Hypervisor, Pin, Route};
use host::ram::{GuestMemoryMmap, MmapRegion};
use kvm_bindings::{
    KVM_CAP_X2APIC_API, KVM_CAP_X86_USER_SPACE_MSR, KVM_CLOCK_TSC_STABLE, KVM_IRQCHIP_IOAPIC,
    KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY,
    KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_pit_config,
};
use kvm_ioctls::{
    Cap, IoEventAddress, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags,
    NoDatamatch, VmFd,
};
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryBackend as _;
use vmm_sys_util::eventfd::EventFd;

use super::device_memory::{CHIPS, DeviceMemory, Place};
use super::fd::{self, Slot};
use super::ram_slots::{IN_SMM, NORMAL, RamSlots};
use super::routes::{Irqfd, PINS, Table};
use super::smm::{self, Smm};
use super::state::{Chips, Clock};
use crate::{hyperv, ram};
use host::smram;

/// Three pages that KVM uses on Intel processors, and its identity map before them. `boot::layout`
/// reserves the 16 KiB.
const IDENTITY_MAP: u64 = 0xfeff_c000;
const TSS: usize = 0xfeff_d000;

/// The state of a virtual machine besides memory and processors.
#[derive(Serialize, Deserialize)]
pub struct State {
    chips: Chips,
    pub clock: Clock,
}

/// A virtual machine without processors.
pub struct Vm {
    pub(super) fd: Arc<VmFd>,
    ram: Arc<RamSlots>,
    next_slot: Mutex<u32>,
    table: Arc<Mutex<Table>>,
    device_memory: Mutex<Vec<Weak<DeviceMemory>>>,
    /// The interrupt controllers and the timer at power-on.
    power_on: Mutex<Option<Chips>>,
    /// `None` in a machine without system-management mode.
    pub(super) smm: Option<Arc<Smm>>,
}

impl Vm {
    /// Creates a machine with this RAM. For system-management mode, `smm` is the number of its
    /// processors, and the RAM is divided as by [`host::smram::parts`]. `finish` adds the interrupt
    /// controllers later: each slot that is added after them waits for a grace period of the
    /// kernel, which takes 5 ms.
    pub fn new(kvm: &Kvm, ram: &Arc<GuestMemoryMmap>, smm: Option<usize>) -> anyhow::Result<Self> {
        let fd = loop {
            match kvm.create_vm() {
                // The kernel starts a thread for it, and a signal interrupts that.
                Err(error) if error.errno() == libc::EINTR => {}
                other => break Arc::new(other.context("a virtual machine")?),
            }
        };
        let table = Arc::new(Mutex::new(Table::default()));
        let next_slot = Mutex::new(u32::try_from(ram.num_regions())?);
        let spaces = if smm.is_some() { &[NORMAL, IN_SMM][..] } else { &[NORMAL] };
        let ram = Arc::new(RamSlots::new(fd.clone(), ram.clone(), spaces)?);
        let smm = match smm {
            Some(processors) => Some(Arc::new(Smm::new(ram.clone(), processors)?)),
            None => {
                ram.map(|_, _| true)?;
                None
            }
        };
        let power_on = None.into();
        Ok(Self { fd, ram, next_slot, table, device_memory: Mutex::default(), power_on, smm })
    }

    fn slot(&self, flags: u32) -> Slot {
        let mut next = self.next_slot.lock().expect("no thread panicked");
        *next += 1;
        Slot { number: *next - 1, flags, guest: 0 }
    }

    /// Adds the interrupt controllers and the timer. Devices should have their memory slots by now.
    pub fn finish(&self) -> anyhow::Result<()> {
        if self.fd.check_extension(Cap::SetIdentityMapAddr) {
            self.fd.set_identity_map_address(IDENTITY_MAP).context("the identity map page")?;
        }
        if self.fd.check_extension(Cap::SetTssAddr) {
            self.fd.set_tss_address(TSS).context("the TSS pages")?;
        }
        self.fd.create_irq_chip().context("interrupt controllers")?;
        let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.fd.create_pit2(config).context("the timer")?;
        self.table.lock().expect("no thread panicked").load(&self.fd)?;
        self.enable(KVM_CAP_X2APIC_API, 3);
        // Unknown and invalid MSRs, and those of a filter, exit to this process, so that the policy
        // is per machine and not per host.
        self.enable(KVM_CAP_X86_USER_SPACE_MSR, 0b111);
        *self.power_on.lock().expect("no thread panicked") = Some(self.chips()?);
        Ok(())
    }

    /// Like QEMU's q35 (`lost_tick_policy=discard`). KVM cannot use AVIC and APICv while it
    /// reinjects ticks, because it must see the end of each timer interrupt.
    ///
    /// It often takes 15 ms: the kernel waits for a grace period, and accesses to the timer wait.
    pub fn discard_lost_ticks(&self) -> anyhow::Result<()> {
        match self.fd.check_extension(Cap::ReinjectControl) {
            true => fd::discard_lost_ticks(&self.fd),
            false => Ok(()),
        }
    }

    /// The interrupt controllers and the timer as they are now.
    fn chips(&self) -> anyhow::Result<Chips> {
        Chips::of(&self.fd, &[KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC])
    }

    /// The memory of all devices, in the order in which they were built.
    pub fn device_memory(&self) -> Vec<Arc<DeviceMemory>> {
        self.device_memory
            .lock()
            .expect("no thread panicked")
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Begins or ends recording of all pages of RAM that are written. The machine must be parked.
    pub fn record_writes(&self, on: bool) -> anyhow::Result<()> {
        self.ram.record_writes(on)
    }

    /// Adds the pages that processors have written to those that this process has written.
    pub fn collect_writes(&self) -> anyhow::Result<()> {
        self.ram.collect_writes()
    }

    /// The state for a snapshot, with the clocks of an earlier moment. The processors must be
    /// paused.
    pub fn state(&self, clock: Clock) -> anyhow::Result<State> {
        Ok(State { chips: self.chips()?, clock })
    }

    /// Continues from the state of a snapshot, without its clocks.
    pub fn restore(&self, state: &State) -> anyhow::Result<()> {
        state.chips.set(&self.fd)
    }

    /// Makes KVM leave registers to this process: with SMM those through which KVM would reach its
    /// memory, and with `own_hyperv` all of Hyper-V's, whether KVM knows them or not.
    pub fn filter_registers(&self, own_hyperv: bool) -> anyhow::Result<()> {
        let nothing = [0; hyperv::MSRS as usize / 8];
        let (read, write) = (MsrFilterRangeFlags::READ, MsrFilterRangeFlags::WRITE);
        let mut ranges = Vec::new();
        if own_hyperv {
            let (base, msr_count) = (hyperv::FIRST_MSR, hyperv::MSRS);
            ranges.push(MsrFilterRange { flags: read | write, base, msr_count, bitmap: &nothing });
        }
        for base in smm::FILTERED.into_iter().filter(|_| self.smm.is_some()) {
            if !(own_hyperv && hyperv::is_register(base)) {
                let bitmap = &nothing[..1];
                ranges.push(MsrFilterRange { flags: write, base, msr_count: 1, bitmap });
            }
        }
        if ranges.is_empty() {
            return Ok(());
        }
        let all = MsrFilterDefaultAction::ALLOW;
        self.fd.set_msr_filter(all, &ranges).context("registers that KVM leaves to this process")
    }

    /// Whether the time stamp counters of all processors agree and run at a constant rate.
    pub fn has_stable_tsc(&self) -> bool {
        self.fd.get_clock().is_ok_and(|clock| clock.flags & KVM_CLOCK_TSC_STABLE != 0)
    }

    /// Enables a capability if KVM has it.
    fn enable(&self, cap: u32, flags: u64) {
        if self.fd.check_extension_raw(cap.into()) > 0 {
            let request = kvm_enable_cap { cap, args: [flags, 0, 0, 0], ..Default::default() };
            if let Err(error) = self.fd.enable_cap(&request) {
                tracing::debug!("KVM has capability {cap} but refuses it: {error}");
            }
        }
    }

    /// Resets the interrupt controllers and the timer to their power-on state.
    pub fn reset(&self) -> anyhow::Result<()> {
        let chips = self.power_on.lock().expect("no thread panicked");
        chips.as_ref().context("the machine has no interrupt controllers yet")?.set(&self.fd)
    }
}

struct KvmPin {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl Pin for KvmPin {
    fn set(&self, high: bool) {
        // Fails only without interrupt controllers, when no processor runs either.
        if let Err(error) = self.vm.set_irq_line(self.gsi, high) {
            tracing::debug!("interrupt pin {}: {error}", self.gsi);
        }
    }
}

impl Hypervisor for Vm {
    fn pin(&self, gsi: u32) -> anyhow::Result<Box<dyn Pin>> {
        anyhow::ensure!(gsi < PINS, "there is no interrupt pin {gsi}: the IOAPIC has {PINS}");
        Ok(Box::new(KvmPin { vm: self.fd.clone(), gsi }))
    }

    fn route(&self) -> anyhow::Result<Box<dyn Route>> {
        Ok(Box::new(Irqfd::new(self.fd.clone(), self.table.clone())?))
    }

    fn connect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>) -> anyhow::Result<()> {
        let address = bell.address;
        anyhow::ensure!(
            bell.kind != Kind::Memory || !CHIPS.contains(&address),
            "doorbell at {address:#x}: reserved for interrupt controllers"
        );
        doorbell(&self.fd, bell, event, true).with_context(|| format!("doorbell at {address:#x}"))
    }

    fn disconnect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>) {
        doorbell(&self.fd, bell, event, false).ok();
    }

    fn backing(&self, size: u64, guest: GuestAccess) -> anyhow::Result<Arc<dyn Backing>> {
        let size = usize::try_from(size)?.next_multiple_of(4096);
        let region = MmapRegion::new(size).with_context(|| format!("{size} bytes of memory"))?;
        let flags = match guest {
            GuestAccess::ReadOnly => KVM_MEM_READONLY,
            GuestAccess::ReadWrite => 0,
            GuestAccess::Tracked => KVM_MEM_LOG_DIRTY_PAGES,
        };
        let ram = self.ram.ram.iter().map(smram::range).collect();
        let guest = Place { vm: self.fd.clone(), ram, smm: self.smm.is_some() };
        let memory = Arc::new(DeviceMemory::new(guest, region, self.slot(flags)));
        self.device_memory.lock().expect("no thread panicked").push(Arc::downgrade(&memory));
        Ok(memory)
    }

    fn release(&self, range: Range<u64>) {
        // The guest's system must not clear the memory of SMM.
        for part in self.ram.shown(NORMAL, &range) {
            ram::release(&self.ram.ram, part);
        }
    }

    fn smm(&self) -> anyhow::Result<Arc<dyn hypervisor::Smm>> {
        Ok(self.smm.clone().context("this machine has no system-management mode")?)
    }
}

fn doorbell(vm: &VmFd, bell: Doorbell, event: &EventFd, on: bool) -> Result<(), kvm_ioctls::Error> {
    let address = match bell.kind {
        Kind::Port => IoEventAddress::Pio(bell.address),
        _ => IoEventAddress::Mmio(bell.address),
    };
    // The width of the write is the type of the value.
    macro_rules! with {
        ($value:expr) => {
            if on {
                vm.register_ioevent(event, &address, $value)
            } else {
                vm.unregister_ioevent(event, &address, $value)
            }
        };
    }
    match (bell.value, bell.length) {
        (None, _) => with!(NoDatamatch),
        (Some(value), 8) => with!(value),
        (Some(value), 1) => with!(u8::try_from(value).unwrap_or(u8::MAX)),
        (Some(value), 2) => with!(u16::try_from(value).unwrap_or(u16::MAX)),
        (Some(value), _) => with!(u32::try_from(value).unwrap_or(u32::MAX)),
    }
}
