//! The interrupt routing table: pins of the two kinds of interrupt controllers, and messages (MSI).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use devices::hypervisor::{Message, Route};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Pins of the IOAPIC. Message routes have the numbers after them.
pub const PINS: u32 = 24;
/// KVM_MAX_IRQ_ROUTES
const MAX_ROUTES: usize = 4096;

/// The routing table, as loaded into KVM.
pub(super) struct Table {
    entries: Vec<kvm_irq_routing_entry>,
    next: u32,
}

impl Default for Table {
    fn default() -> Self {
        let pin = |gsi, irqchip, pin| {
            let mut entry =
                kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
            entry.u.irqchip.irqchip = irqchip;
            entry.u.irqchip.pin = pin;
            entry
        };
        let master =
            (0..8).filter(|gsi| *gsi != 2).map(|gsi| pin(gsi, KVM_IRQCHIP_PIC_MASTER, gsi));
        let slave = (8..16).map(|gsi| pin(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - 8));
        // The timer is wired to pin 2, as in the MADT.
        let ioapic = (0..PINS).filter(|gsi| *gsi != 2).map(|gsi| {
            let input = if gsi == 0 { 2 } else { gsi };
            pin(gsi, KVM_IRQCHIP_IOAPIC, input)
        });
        Self { entries: master.chain(slave).chain(ioapic).collect(), next: PINS }
    }
}

impl Table {
    pub(super) fn load(&self, vm: &VmFd) -> anyhow::Result<()> {
        let table = KvmIrqRouting::from_entries(&self.entries).context("interrupt routes")?;
        vm.set_gsi_routing(&table).context("interrupt routes")
    }

    fn aim(&mut self, gsi: u32, message: Message) {
        let mut entry =
            kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
        let [low, high] = [message.address & 0xffff_ffff, message.address >> 32];
        entry.u.msi.address_lo = u32::try_from(low).expect("32 bits");
        entry.u.msi.address_hi = u32::try_from(high).expect("32 bits");
        entry.u.msi.data = message.data;
        self.entries.retain(|other| other.gsi != gsi);
        self.entries.push(entry);
    }
}

/// A message route: an event file descriptor that KVM turns into the interrupt.
pub(super) struct Irqfd {
    vm: Arc<VmFd>,
    table: Arc<Mutex<Table>>,
    gsi: u32,
    event: EventFd,
    connected: AtomicBool,
}

impl Irqfd {
    pub(super) fn new(vm: Arc<VmFd>, table: Arc<Mutex<Table>>) -> anyhow::Result<Self> {
        let gsi = {
            let mut table = table.lock().expect("no thread panicked");
            let gsi = table.next;
            let free = (gsi as usize) < MAX_ROUTES;
            anyhow::ensure!(free, "all {MAX_ROUTES} interrupt routes are taken");
            table.next += 1;
            gsi
        };
        let event = EventFd::new(EFD_NONBLOCK).context("an event for an interrupt")?;
        Ok(Self { vm, table, gsi, event, connected: AtomicBool::new(false) })
    }
}

impl Route for Irqfd {
    fn set_message(&self, message: Message) -> anyhow::Result<()> {
        let mut table = self.table.lock().expect("no thread panicked");
        let before = table.entries.clone();
        table.aim(self.gsi, message);
        if let Err(error) = table.load(&self.vm) {
            // No processor has this address. Restore the table, so that the other routes stay
            // loadable.
            table.entries = before;
            return Err(error);
        }
        if !self.connected.load(Ordering::Acquire) {
            self.vm.register_irqfd(&self.event, self.gsi).context("an interrupt event")?;
            self.connected.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn send(&self) {
        // The counter is full only after 2^64 interrupts that KVM did not take.
        self.event.write(1).ok();
    }
}
