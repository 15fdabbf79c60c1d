//! The recipe: what a machine is made of, in the order in which it is put together.
//!
//! Here, and nowhere else, devices meet the tables that describe them.

mod bars;
mod description;
mod direct;
mod firmware;
mod generation;
pub mod inspect;
mod order;

use std::fs::File;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use boot::layout::Ram;
use devices::balloon;
use devices::board::Board;
use devices::display::bochs;
use devices::grants::Events;
use devices::hypervisor::Host;
use devices::nvme;
use devices::pci::Address;
use devices::platform::{flash, fw_cfg, serial};
use devices::power::Buttons;
use devices::registry;
use devices::usb::xhci;
use host::disk::Disks;
use host::display::Screens;
use host::input::Hub;
use host::memory::Memory;
use host::net::link::Links;
use host::stream::Stream;
use host::uuid::Uuid;
use kvm_ioctls::Kvm;
use vm_memory::GuestMemoryMmap;

use crate::config::{Config, Display, Hyperv, guid};
use crate::cpuid::{Model, Topology};
use crate::kvm::vcpu::Vcpu;
use crate::kvm::vm::Vm;
use crate::msr::Policy;
use crate::status::{Failure, Status};
use crate::vcpu::{OnStop, Processors};
use crate::{kvm, ram};

pub use self::description::Description;
use self::direct::Direct;
use self::firmware::Source;
pub use self::generation::Generation;

/// Where the display is if nothing else is said.
const DISPLAY_SLOT: Address = Address::new(1, 0);
/// Where PCs of this kind have USB; out of the way of disks and networks.
const USB_SLOT: Address = Address::new(0x1d, 0);

/// A machine that is off.
pub struct Machine {
    config: Config,
    // Processors first: fields are dropped in this order, and they use all the rest.
    processors: Processors,
    board: Board,
    vm: Arc<Vm>,
    ram: Arc<GuestMemoryMmap>,
    /// How a kernel is started without firmware.
    direct: Option<Direct>,
    generation: Arc<Generation>,
    /// No processor has run: interrupt controllers and processors are as KVM made them.
    fresh: bool,
}

/// What is the same for a machine that runs and one that is only looked at.
pub struct Plan {
    /// The configuration, with what was not said filled in.
    pub config: Config,
    /// Where RAM lies.
    pub ram: Ram,
    /// Processors as they see themselves.
    pub model: Model,
    /// APIC ids, processor by processor.
    pub apic_ids: Vec<u32>,
    /// The VM Generation ID.
    pub generation: Arc<Generation>,
    hyperv: bool,
    /// Only looked at: devices leave the host's files and terminals alone.
    dry: bool,
}

impl Plan {
    /// Fills in what was not said, from what this host's KVM can do.
    ///
    /// # Errors
    ///
    /// When the configuration does not fit this host.
    pub fn new(mut config: Config, kvm: &Kvm) -> anyhow::Result<Self> {
        config.check()?;
        let settled = config.cpus.settle(kvm.get_max_vcpus());
        config.cpus = settled.map_err(|error| Failure::new(Status::Usage, error.to_string()))?;
        let topology = Topology::new(config.cpus);
        let hyperv = match config.hyperv {
            Hyperv::Auto => config.firmware.is_some(),
            Hyperv::On => true,
            Hyperv::Off => false,
        };
        let model = Model::of_host(kvm, topology, hyperv)?;
        let apic_ids: Vec<_> = (0..config.cpus.count).map(|it| topology.apic_id(it)).collect();
        let last = apic_ids.last().copied().unwrap_or(0) as usize;
        let most = kvm.get_max_vcpu_id();
        anyhow::ensure!(
            last < most,
            "--cpus {}: with this layout the last processor has id {last}, and this host's KVM \
             allows ids below {most}; make cores and threads powers of two",
            config.cpus
        );
        let ram = Ram::new(config.memory.size.0);
        let generation = Arc::new(identify(&mut config)?);
        Ok(Self { config, ram, model, apic_ids, generation, hyperv, dry: false })
    }

    /// The same plan, to be looked at only.
    #[must_use]
    pub fn dry(self) -> Self {
        Self { dry: true, ..self }
    }

    /// The devices that a machine has, in the order in which they are built.
    pub fn devices(&self) -> Vec<registry::Config> {
        let config = &self.config;
        let serial = config.serial.clone().unwrap_or(Stream::Stdio);
        let mut devices = vec![
            registry::Config::HostBridge(Default::default()),
            registry::Config::Lpc(Default::default()),
            registry::Config::Rtc(Default::default()),
            registry::Config::I8042(Default::default()),
        ];
        if let Display::Present(display) = &config.display {
            // Drivers find it anywhere; people look for it here.
            let slot = display.slot.or(Some(DISPLAY_SLOT));
            let display = bochs::Config { slot, ..display.clone() };
            devices.push(registry::Config::Display(display));
            devices.extend(self.hands());
        }
        if let Some(code) = &config.firmware {
            let (code, vars) = (code.clone(), config.vars.clone());
            let readonly = false;
            devices.push(registry::Config::Flash(flash::Config { code, vars, readonly }));
        }
        // After the flash, whose lock keeps a second start of this machine away from our log.
        devices.push(registry::Config::Serial(serial::Config { port: 1, to: serial }));
        devices.extend(config.tpm.iter().cloned().map(registry::Config::Tpm));
        // A controller that every system has a driver for.
        let disks = config.disk.iter().cloned().map(nvme::Config);
        devices.extend(disks.map(registry::Config::Nvme));
        devices.extend(config.device.iter().cloned());
        let processors = u16::try_from(config.cpus.count).unwrap_or(u16::MAX);
        devices.iter_mut().for_each(|device| device.suit(processors));
        if self.dry {
            devices.iter_mut().for_each(registry::Config::leave_host_alone);
        }
        devices
    }

    /// What the person before the screen has, unless the user plugs USB devices of his own: a
    /// tablet, whose pointer is where the viewer's is, and a keyboard, both driven everywhere.
    fn hands(&self) -> Vec<registry::Config> {
        if self.config.device.iter().any(|device| matches!(device, registry::Config::Xhci(_))) {
            return Vec::new();
        }
        let xhci = xhci::Config { slot: Some(USB_SLOT), ..Default::default() };
        vec![
            registry::Config::Xhci(xhci),
            registry::Config::UsbKeyboard(Default::default()),
            registry::Config::UsbTablet(Default::default()),
        ]
    }

    /// Puts all devices on a board.
    ///
    /// # Errors
    ///
    /// When one of them cannot have what it needs.
    pub fn furnish(&self, board: &mut Board) -> anyhow::Result<Arc<OnceLock<Description>>> {
        let description = Arc::<OnceLock<Description>>::default();
        for device in self.devices() {
            board.add(device.kind(), |place| device.build(place))?;
        }
        board.usb().check()?;
        let source = Box::new(Source::new(self, board, description.clone())?);
        board.add("fw-cfg", |place| fw_cfg::build(source, place))?;
        let described = Description::new(self, board)?;
        if description.set(described).is_err() {
            unreachable!("it was made above");
        }
        Ok(description)
    }
}

/// Builds a machine, switched off: all that it is made of is there and open, and no thread runs.
///
/// # Errors
///
/// When the host, a file or the configuration does not allow it.
pub fn build(config: Config, events: Events, on_stop: OnStop) -> anyhow::Result<Machine> {
    let kvm = kvm::open()?;
    kvm::check(&kvm)?;
    let plan = Plan::new(config, &kvm)?;
    let ranges = plan.ram.ranges().into_iter().map(|range| (range.start, range.end - range.start));
    let ram = ram::map(&plan.config.memory, &ranges.collect::<Vec<_>>())?;
    let vm = Arc::new(Vm::new(&kvm, &ram)?);

    let mut board = Board::new(Memory::new(ram.clone()), vm.clone() as Arc<dyn Host>, events);
    let description = plan.furnish(&mut board)?;
    let direct = direct(&plan.config, description)?;

    vm.finish()?;
    let vcpus = (0..).zip(&plan.apic_ids).map(|(index, apic_id)| {
        let cpuid = plan.model.of(index)?;
        Vcpu::new(&kvm, &vm, (index as usize, *apic_id), &cpuid, plan.hyperv)
    });
    let vcpus = vcpus.collect::<anyhow::Result<_>>()?;
    let (policy, generation) = (Policy::new(plan.config.msr, plan.hyperv), plan.generation);
    let processors = Processors::new(vcpus, board.spaces().clone(), policy, on_stop);
    let config = plan.config;
    Ok(Machine { config, processors, board, vm, ram, direct, generation, fresh: true })
}

/// Fills in the machine's UUID, where none was given and there is a disk to derive it from, and
/// gives its VM Generation ID.
fn identify(config: &mut Config) -> anyhow::Result<Generation> {
    if config.smbios.uuid.is_empty() {
        let first = config.disk.first().map(|disk| &*disk.path);
        let first = first.or_else(|| config.device.iter().find_map(registry::Config::image));
        config.smbios.uuid = first.map_or(Uuid::default(), guid::of_disk).to_string();
    }
    let own = config.vmgenid.as_deref().filter(|id| !id.is_empty());
    let id = own.map_or_else(
        || config.smbios.uuid.parse().map(|uuid: Uuid| guid::derived("generation", &uuid.0)),
        Uuid::from_str,
    )?;
    config.vmgenid = Some(id.to_string());
    Ok(Generation::new(id))
}

/// What is started without firmware: the kernel that was named, or the probe.
fn direct(
    config: &Config,
    description: Arc<OnceLock<Description>>,
) -> anyhow::Result<Option<Direct>> {
    if config.firmware.is_some() {
        return Ok(None);
    }
    let open = |what: &str, path: &Path| {
        open(path).with_context(|| format!("--{what} {}", path.display()))
    };
    let command_line = config.cmdline.clone();
    let Some(kernel) = &config.kernel else {
        // Whoever has a screen to look at does so after the end, too.
        let then = if config.is_watched() { "then=halt" } else { "then=poweroff" };
        let words = command_line.unwrap_or_else(|| then.into());
        return Ok(Some(Direct::image(probe::IMAGE, words, description)));
    };
    let command_line = command_line.unwrap_or_default();
    let initrd = config.initrd.as_deref().map(|path| open("initrd", path)).transpose()?;
    let kernel = (kernel.display().to_string(), open("kernel", kernel)?);
    Ok(Some(Direct::files(kernel, initrd, command_line, description)))
}

/// Opens what must be a plain file: a folder has no length, and a pipe would make us wait.
fn open(path: &Path) -> anyhow::Result<File> {
    let found = std::fs::metadata(path)?;
    anyhow::ensure!(!found.is_dir(), "it is a directory");
    anyhow::ensure!(found.is_file(), "it is not a file");
    Ok(File::open(path)?)
}

impl Machine {
    /// Starts the threads of the processors, which wait.
    ///
    /// # Errors
    ///
    /// When the host has no thread left.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.processors.start()
    }

    /// Makes everything as new, with the kernel in its place; `resume` starts it.
    ///
    /// # Errors
    ///
    /// When a device or KVM refuses, or the kernel is not one.
    pub fn prepare(&mut self) -> anyhow::Result<()> {
        self.board.reset()?;
        if !std::mem::take(&mut self.fresh) {
            self.vm.reset()?;
            for vcpu in self.processors.each() {
                vcpu.reset()?;
            }
        }
        if let Some(direct) = &mut self.direct {
            let first = self.processors.each().next().context("a machine without processors")?;
            direct.start(&self.ram, self.board.spaces(), &first)?;
            self.generation.started_directly();
        }
        Ok(())
    }

    /// Stops the processors.
    pub fn pause(&self) {
        self.processors.pause();
    }

    /// Lets the processors run on.
    pub fn resume(&self) {
        self.processors.resume();
    }

    /// Tells guests with KVM's clock that they were paused, so that they see no lock-up.
    pub fn wake_clocks(&self) {
        self.processors.each().for_each(|vcpu| vcpu.wake_clock());
    }

    /// Stops the devices: what they hold is on the host's side now. Processors must be paused.
    pub fn park(&self) {
        self.board.park();
    }

    /// Plugs in one more USB device; its name.
    ///
    /// # Errors
    ///
    /// When it is no USB device, cannot have what it needs, or all ports are taken.
    pub fn attach(&mut self, mut device: registry::Config) -> anyhow::Result<String> {
        let kind = device.kind();
        anyhow::ensure!(
            device.is_usb(),
            "`{kind}` cannot be plugged into a machine that runs: USB devices can"
        );
        device.suit(u16::try_from(self.config.cpus.count).unwrap_or(u16::MAX));
        let before = self.board.usb().names();
        self.board.add(kind, |place| device.build(place))?;
        if let Err(error) = self.board.usb().check() {
            for name in self.board.usb().names() {
                if !before.contains(&name) {
                    self.board.pull(&name)?;
                }
            }
            return Err(error);
        }
        let new = self.board.usb().names().into_iter().find(|name| !before.contains(name));
        new.with_context(|| format!("`{kind}` is gone already"))
    }

    /// Pulls out a USB device.
    ///
    /// # Errors
    ///
    /// When there is none of this name.
    pub fn detach(&mut self, name: &str) -> anyhow::Result<()> {
        self.board.pull(name)
    }

    /// The names of its USB devices.
    pub fn usb(&self) -> Vec<String> {
        self.board.usb().names()
    }

    /// The configuration, with what was not said filled in.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the VM Generation ID and notifies the guest.
    ///
    /// # Errors
    ///
    /// When the guest has it where no RAM is.
    pub fn renew(&self, id: Uuid) -> anyhow::Result<()> {
        let memory = Memory::new(self.ram.clone());
        self.generation.change(id, &memory, self.board.buttons())
    }

    /// The VM Generation ID.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// The buttons on the case.
    pub fn buttons(&self) -> &Buttons {
        self.board.buttons()
    }

    /// The balloon, if it has one.
    pub fn balloon(&self) -> &balloon::Hub {
        self.board.balloon()
    }

    /// Its displays.
    pub fn screens(&self) -> &Arc<Screens> {
        self.board.screens()
    }

    /// Its keyboards and mice.
    pub fn input(&self) -> &Arc<Hub> {
        self.board.input()
    }

    /// Its disks.
    pub fn disks(&self) -> &Disks {
        self.board.disks()
    }

    /// Its network cables.
    pub fn links(&self) -> &Links {
        self.board.links()
    }

    /// Sends a non-maskable interrupt to the first processor; all are paused then.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn nmi(&self) -> anyhow::Result<()> {
        self.processors.pause();
        self.processors.each().next().map_or(Ok(()), |vcpu| vcpu.nmi())
    }

    /// The registers of all processors, which must be paused.
    pub fn registers(&self) -> Vec<String> {
        self.processors.each().map(|vcpu| vcpu.registers()).collect()
    }
}
