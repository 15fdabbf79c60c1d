//! Builds a machine from its parts, in a fixed order.
//!
//! No other module connects devices with the tables that describe them.

mod bars;
pub mod clone;
mod description;
mod direct;
mod firmware;
mod generation;
pub mod inspect;
mod order;
mod saved;

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use boot::layout::Ram;
use devices::board::Board;
use devices::grants::{Events, Shared};
use devices::hypervisor::Hypervisor;
use devices::nvme;
use devices::pci::host as host_bridge;
use devices::pci::{Address, lpc};
use devices::platform::{flash, fw_cfg, serial};
use devices::registry;
use devices::usb::xhci;
use host::disk::Disks;
use host::gate::Gate;
use host::lock;
use host::memory::Memory;
use host::ram::GuestMemoryMmap;
use host::size::Size;
use host::smram::{self, MIN_LOW_RAM};
use host::stream::Stream;
use host::uuid::Uuid;
use kvm_bindings::{CpuId, kvm_cpuid_entry2 as Leaf};
use kvm_ioctls::Kvm;
use rustix::fs::{Access, access};

use crate::config::{Config, Display, Hyperv, guid};
use crate::cpuid::{Model, Topology};
use crate::hyperv::{Own, Provider, Tsc};
use crate::kvm::vcpu::{ProcessorId, Vcpu};
use crate::kvm::vm::Vm;
use crate::msr::{Policy, Registers};
use crate::snapshot::memory::Pages;
use crate::snapshot::{Moment, Origin, Snapshot, refused};
use crate::status::{Failure, Status};
use crate::vcpu::{OnStop, Processors};
use crate::{kvm, ram};

pub use self::description::Description;
use self::direct::Direct;
use self::firmware::Source;
pub use self::generation::Generation;
use self::saved::Built;
pub use self::saved::Unchecked;

/// Default slot of the display.
const DISPLAY_SLOT: Address = Address::new(1, 0);
/// Slot of the USB controller, as in common PCs. Disks and networks do not get this slot.
const USB_SLOT: Address = Address::new(0x1d, 0);

pub struct Machine {
    pub config: Config,
    // Processors first: fields are dropped in this order, and processors use all the others.
    processors: Processors,
    board: Board,
    vm: Arc<Vm>,
    ram: Arc<GuestMemoryMmap>,
    /// Boots a kernel without firmware.
    direct: Option<Direct>,
    pub generation: Arc<Generation>,
    /// A sentence for the log, if this host's KVM lacks something that the guest was to have.
    pub lack: Option<&'static str>,
    /// No processor has run yet: interrupt controllers and processors are as KVM created them.
    fresh: bool,
    built: Built,
    /// The process's pages, which tell unchanged memory.
    pages: Arc<Pages>,
    /// The snapshot that the machine was restored from.
    origin: Option<Arc<Origin>>,
    /// Where the machine continues, while it stays paused after it was saved.
    parked: Option<Moment>,
    /// Whether a snapshot has this moment.
    saved: bool,
}

/// The parts of a machine that `run` and `inspect` share.
pub struct Plan {
    /// Defaults are filled in.
    pub config: Config,
    pub ram: Ram,
    pub model: Model,
    /// Indexed by processor number.
    pub apic_ids: Vec<u32>,
    pub generation: Arc<Generation>,
    hyperv: Option<Provider>,
    smm: bool,
    /// `inspect`: devices do not touch the host's files and terminals.
    dry: bool,
}

/// The warning of a host whose KVM does not filter all accesses of a hypervisor in the guest.
const UNFILTERED: &str = "nested virtualization on this host: a kernel in the guest could get past \
     system-management mode and change the keys of Secure Boot: update the host to Linux 6.12, or \
     do without `nested` (VMX=N)";

impl Plan {
    /// Fills in the defaults, which depend on this host's KVM.
    pub fn new(mut config: Config, kvm: &Kvm) -> anyhow::Result<Self> {
        config.check()?;
        let settled = config.cpus.settle(kvm.get_max_vcpus());
        config.cpus = settled.map_err(|error| Failure::new(Status::Usage, error.to_string()))?;
        let topology = Topology::new(config.cpus);
        let hyperv = hyperv_of(&config, kvm)?;
        let model = Model::of_host(kvm, topology, hyperv, &config.features)?;
        let apic_ids: Vec<_> = (0..config.cpus.count).map(|it| topology.apic_id(it)).collect();
        let last = apic_ids.last().copied().unwrap_or(0) as usize;
        let limit = kvm.get_max_vcpu_id();
        anyhow::ensure!(
            last < limit,
            "--cpus {}: with this layout the last processor has id {last}, and this host's KVM \
             allows ids below {limit}; make cores and threads powers of two",
            config.cpus
        );
        let ram = Ram::new(config.memory.size.0);
        if config.smm {
            kvm::smm::check(kvm).context("--smm on")?;
            anyhow::ensure!(
                ram.low >= MIN_LOW_RAM,
                "--smm on needs at least {} of memory, not {}",
                Size(MIN_LOW_RAM),
                config.memory.size
            );
            let kernel = rustix::system::uname();
            if model.has_vmx() && !kvm::smm::filters_lists(&kernel.release().to_string_lossy()) {
                tracing::warn!("{UNFILTERED}");
            }
        }
        let smm = config.smm;
        let generation = Arc::new(identify(&mut config)?);
        Ok(Self { config, ram, model, apic_ids, generation, hyperv, smm, dry: false })
    }

    /// The CPUID leaves of each processor.
    fn cpuid(&self) -> anyhow::Result<Vec<Vec<Leaf>>> {
        let processors = 0..self.config.cpus.count;
        processors.map(|index| Ok(self.model.of(index)?.as_slice().to_vec())).collect()
    }

    /// Makes the plan one for `inspect`.
    pub fn dry(self) -> Self {
        Self { dry: true, ..self }
    }

    /// The ranges of RAM, each of which is one region. SMRAM is in regions of its own.
    fn regions(&self) -> Vec<Range<u64>> {
        if !self.smm {
            return self.ram.ranges();
        }
        let high = self.ram.ranges().into_iter().skip(1);
        smram::parts(self.ram.low).into_iter().chain(high).collect()
    }

    /// Ordered as they are built.
    pub fn devices(&self) -> Vec<registry::Config> {
        let config = &self.config;
        let serial = config.serial.clone().unwrap_or(Stream::Stdio);
        let mut devices = vec![
            registry::Config::HostBridge(host_bridge::Config { smm: self.smm }),
            registry::Config::Lpc(lpc::Config { smm: self.smm }),
            registry::Config::Rtc(Default::default()),
            registry::Config::I8042(Default::default()),
        ];
        if let Display::Present(display) = &config.display {
            // Drivers find the display in any slot; users expect it in this one.
            devices.push(display.device(DISPLAY_SLOT));
            devices.extend(self.usb_input());
        }
        if let Some(code) = &config.firmware {
            let (code, vars) = (code.clone(), config.vars.clone());
            let flash = flash::Config { code, vars, readonly: false, smm: self.smm };
            devices.push(registry::Config::Flash(flash));
        }
        // After the flash: its lock stops a second start of this machine before it truncates our
        // log.
        devices.push(registry::Config::Serial(serial::Config { port: 1, to: serial }));
        devices.extend(config.tpm.iter().cloned().map(registry::Config::Tpm));
        // NVMe: every common operating system has a driver.
        let disks = config.disk.iter().cloned().map(nvme::Config);
        devices.extend(disks.map(registry::Config::Nvme));
        devices.extend(config.device.iter().cloned());
        let processors = u16::try_from(config.cpus.count).unwrap_or(u16::MAX);
        devices.iter_mut().for_each(|device| device.fill_defaults(processors));
        if self.dry {
            devices.iter_mut().for_each(registry::Config::detach_host_side);
        }
        devices
    }

    /// The default USB input devices, unless the user configures a USB controller: a keyboard, and
    /// a tablet, whose pointer follows the viewer's. Common systems have drivers for both.
    fn usb_input(&self) -> Vec<registry::Config> {
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

    pub fn add_devices(&self, board: &mut Board) -> anyhow::Result<Arc<OnceLock<Description>>> {
        let description = Arc::<OnceLock<Description>>::default();
        for device in self.devices() {
            board.add(device.kind(), |grants| device.build(grants))?;
        }
        board.shared.usb.check()?;
        let source = Box::new(Source::new(self, board, description.clone())?);
        board.add("fw-cfg", |grants| fw_cfg::build(source, grants))?;
        let described = Description::new(self, board)?;
        if description.set(described).is_err() {
            unreachable!("it was made above");
        }
        Ok(description)
    }
}

/// Builds a machine, switched off: everything is open, and no thread runs. With a snapshot, it has
/// the memory and the processors of that, and `Machine::restore` adds the rest.
pub fn build(
    config: Config,
    snapshot: Option<&Snapshot>,
    events: Events,
    on_stop: OnStop,
) -> anyhow::Result<Machine> {
    let kvm = kvm::open()?;
    kvm::check(&kvm)?;
    let generation_id = config.vmgenid.clone();
    let plan = Plan::new(config, &kvm)?;
    let lack = hyperv_warning(&plan.config, plan.hyperv);
    let cpuid = match snapshot {
        Some(snapshot) => snapshot.cpuid(&plan)?,
        None => plan.cpuid()?,
    };
    let ram = match snapshot {
        Some(snapshot) => snapshot.ram(&plan.config.memory, &plan.regions())?,
        None => ram::map(&plan.config.memory, &plan.regions(), None)?,
    };
    let files = saved::files(&plan);
    let marks =
        snapshot.map_or(Ok(Vec::new()), |_| saved::marks(&files, &plan.config, |_| Ok(None)))?;
    let vm = Arc::new(Vm::new(&kvm, &ram, plan.smm.then_some(plan.apic_ids.len()))?);

    let memory = if plan.smm { Memory::with_smram(&ram) } else { Memory::new(ram.clone()) };
    let mut board = Board::new(memory, vm.clone() as Arc<dyn Hypervisor>, events);
    board.shared.disks = Arc::new(Disks::behind(gate(snapshot, &plan.config)));
    board.goes_on = snapshot.is_some();
    let description = plan.add_devices(&mut board)?;
    let direct = direct(&plan.config, description)?;
    let layout = saved::layout(&board);
    let built = Built { layout, files, cpuid, generation: generation_id };

    vm.finish()?;
    // A guest that continues does not wait for this: see `settle_timer`.
    snapshot.map_or_else(|| vm.discard_lost_ticks(), |_| Ok(()))?;
    vm.filter_registers(plan.hyperv == Some(Provider::Own))?;
    let vcpus =
        built.cpuid.iter().zip(&plan.apic_ids).enumerate().map(|(index, (cpuid, apic_id))| {
            let cpuid = CpuId::from_entries(cpuid).context("CPUID")?;
            let id = ProcessorId { index, apic_id: *apic_id };
            Vcpu::new(&kvm, &vm, id, &cpuid, plan.hyperv)
        });
    let vcpus = vcpus.collect::<anyhow::Result<Vec<_>>>()?;
    let policy = Policy::new(plan.config.msr, plan.hyperv.is_some());
    let first = vcpus.first().filter(|_| plan.hyperv == Some(Provider::Own));
    let hyperv = first.map(|first| own_hyperv(first, &vm, &board.shared.memory)).transpose()?;
    let registers = Registers { policy, hyperv };
    let processors = Processors::new(vcpus, board.shared.spaces.clone(), registers, on_stop);
    let (config, generation) = (plan.config, plan.generation);
    let machine = Machine {
        config,
        processors,
        board,
        vm,
        ram,
        direct,
        generation,
        lack,
        fresh: true,
        built,
        pages: Arc::new(Pages::open()),
        origin: None,
        parked: None,
        saved: false,
    };
    snapshot.map_or(Ok(()), |snapshot| machine.check(&snapshot.saved, marks))?;
    Ok(machine)
}

/// Our own interface of Hyper-V.
fn own_hyperv(first: &Vcpu, vm: &Arc<Vm>, memory: &Memory) -> anyhow::Result<Own> {
    let tsc = Tsc { hertz: first.tsc_hertz()?, now: first.tsc()? };
    let clock = vm.clone();
    let stable = Box::new(move || clock.has_stable_tsc());
    Ok(Own::new(memory.clone(), tsc, stable))
}

/// The gate in front of the machine's files: that of a restored machine is closed until its memory
/// is checked, and until the guest goes on.
fn gate(snapshot: Option<&Snapshot>, config: &Config) -> Arc<Gate> {
    Arc::new(snapshot.map_or_else(Gate::default, |it| {
        Gate::new(it.is_checked_later(&config.memory), it.waits())
    }))
}

/// The ranges of RAM of the machine that arrives here. Fails if this host cannot run it.
pub fn expect(config: Config, cpuid: &[Vec<Leaf>]) -> anyhow::Result<Vec<Range<u64>>> {
    let kvm = kvm::open()?;
    kvm::check(&kvm)?;
    let plan = Plan::new(config, &kvm)?;
    refused(saved::compare_cpuid(cpuid, &plan))?;
    for path in saved::files(&plan).values().chain(&plan.config.vars) {
        let name = path.display();
        if access(path, Access::WRITE_OK).is_err() {
            // It is not locked, because it can only be read.
        } else if path.is_file() {
            anyhow::ensure!(
                lock::is_taken(path).with_context(|| name.to_string())?,
                "{name} is not in use by the machine: both ends must have the same file, with \
                 locks that work between hosts (NFS without `nolock`)"
            );
        } else {
            let claimed = lock::open_exclusive(path).map(drop);
            claimed.context("a block device moves only between hosts")?;
        }
    }
    Ok(plan.regions())
}

/// The provider of Hyper-V's interface to the guest.
fn hyperv_of(config: &Config, kvm: &Kvm) -> anyhow::Result<Option<Provider>> {
    let (theirs, own) = (kvm::has_hyperv(kvm), kvm::allows_own_hyperv(kvm));
    let lacks = |what, other| {
        let reason = format!("this host's KVM {what}; use `--hyperv {other}` or `--hyperv off`");
        Err(Failure::new(Status::NoKvm, reason))
    };
    Ok(match config.hyperv {
        Hyperv::Auto if config.firmware.is_none() => None,
        Hyperv::Auto | Hyperv::On if theirs => Some(Provider::Kvm),
        Hyperv::Auto | Hyperv::On => own.then_some(Provider::Own),
        Hyperv::Kvm if theirs => Some(Provider::Kvm),
        Hyperv::Kvm => return lacks("has no Hyper-V (KVM_CAP_HYPERV_CPUID)", "own"),
        Hyperv::Own if own => Some(Provider::Own),
        Hyperv::Own => {
            return lacks("does not pass registers on (KVM_CAP_X86_MSR_FILTER)", "kvm");
        }
        Hyperv::Off => None,
    })
}

/// A warning if the guest lacks enlightenments that it was to have.
fn hyperv_warning(config: &Config, provider: Option<Provider>) -> Option<&'static str> {
    let wanted = match config.hyperv {
        Hyperv::Auto => config.firmware.is_some(),
        Hyperv::On => true,
        Hyperv::Kvm | Hyperv::Own | Hyperv::Off => false,
    };
    match provider.filter(|_| wanted) {
        Some(Provider::Own) => Some(
            "this host's KVM has no Hyper-V enlightenments (CONFIG_KVM_HYPERV): the guest gets \
             clocks and crash reports, but no timers and no faster interrupts",
        ),
        None if wanted => Some(
            "this host's KVM has no Hyper-V enlightenments (CONFIG_KVM_HYPERV), and cannot pass \
             their registers on (KVM_CAP_X86_MSR_FILTER): the guest gets none",
        ),
        _ => None,
    }
}

/// Fills in the machine's UUID, derived from the first disk unless it is configured, and returns
/// the VM Generation ID.
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

/// The image to start without firmware: the configured kernel, or the probe.
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
        // If the screen is served, the probe stays on it at its end.
        let then = if config.is_watched() { "then=halt" } else { "then=poweroff" };
        let words = command_line.unwrap_or_else(|| then.into());
        return Ok(Some(Direct::image(probe::IMAGE, words, description)));
    };
    let command_line = command_line.unwrap_or_default();
    let initrd = config.initrd.as_deref().map(|path| open("initrd", path)).transpose()?;
    let (name, kernel) = (kernel.display().to_string(), open("kernel", kernel)?);
    Ok(Some(Direct::files(name, kernel, initrd, command_line, description)))
}

/// Opens a regular file. A directory has no length, and opening a pipe would block.
fn open(path: &Path) -> anyhow::Result<File> {
    let found = std::fs::metadata(path)?;
    anyhow::ensure!(!found.is_dir(), "it is a directory");
    anyhow::ensure!(found.is_file(), "it is not a file");
    Ok(File::open(path)?)
}

impl Machine {
    /// Starts the processors' threads, paused.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.processors.start()
    }

    /// Prepares the machine, or restores it from the snapshot with which it was built.
    pub fn begin(&mut self, snapshot: Option<Snapshot>) -> anyhow::Result<()> {
        match snapshot {
            Some(snapshot) => {
                let option =
                    if self.config.incoming.is_some() { "--incoming" } else { "--restore" };
                self.restore(snapshot).context(option)
            }
            None => self.prepare(),
        }
    }

    /// Resets the machine and loads the kernel. `resume` starts it.
    pub fn prepare(&mut self) -> anyhow::Result<()> {
        if self.take_moment().is_some() {
            self.board.shared.time.go_on();
        }
        self.board.reset()?;
        if !std::mem::take(&mut self.fresh) {
            self.vm.reset()?;
            self.processors.reset_registers();
            for vcpu in self.processors.each() {
                vcpu.reset()?;
            }
        }
        if let Some(direct) = &mut self.direct {
            let first = self.processors.each().next().context("a machine without processors")?;
            direct.start(&self.ram, &self.board.shared.spaces, &first)?;
            self.generation.started_directly();
        }
        Ok(())
    }

    /// Whether the processors wait for `vmm ctl resume`, as those of a restored machine may.
    pub fn waits(&self) -> bool {
        self.board.shared.disks.gate().is_paused()
    }

    pub fn pause(&self) {
        self.processors.pause();
    }

    /// Like `pause`, but waits only for this time. Returns whether all have stopped.
    pub fn pause_within(&self, time: Duration) -> bool {
        self.processors.pause_within(time)
    }

    pub fn resume(&self) {
        self.processors.resume();
    }

    /// Tells guests that use KVM's clock that they were paused, so that they report no lock-up.
    pub fn wake_clocks(&self) {
        self.processors.each().for_each(|vcpu| vcpu.wake_clock());
    }

    /// Parks the devices, which hand their buffered data to the host. Processors must be paused.
    pub fn park(&self) {
        self.board.park();
    }

    /// Plugs in a USB device, and returns its name.
    pub fn attach(&mut self, mut device: registry::Config) -> anyhow::Result<String> {
        let kind = device.kind();
        anyhow::ensure!(
            device.is_usb(),
            "`{kind}` cannot be plugged into a running machine; only USB devices can"
        );
        device.fill_defaults(u16::try_from(self.config.cpus.count).unwrap_or(u16::MAX));
        let before = self.board.shared.usb.names();
        self.board.add(kind, |grants| device.build(grants))?;
        if let Err(error) = self.board.shared.usb.check() {
            for name in self.board.shared.usb.names() {
                if !before.contains(&name) {
                    self.board.unplug(&name)?;
                }
            }
            return Err(error);
        }
        let new = self.board.shared.usb.names().into_iter().find(|name| !before.contains(name));
        new.with_context(|| format!("`{kind}` was unplugged meanwhile"))
    }

    pub fn detach(&mut self, name: &str) -> anyhow::Result<()> {
        self.board.unplug(name)
    }

    /// Removes USB devices that were unplugged at the host.
    pub fn remove_retired(&mut self) {
        for name in self.board.remove_retired() {
            tracing::info!("{name} was unplugged at the host");
        }
    }

    /// The names of the USB devices.
    pub fn usb(&self) -> Vec<String> {
        self.board.shared.usb.names()
    }

    /// Changes the VM Generation ID and notifies the guest. Fails if the guest has placed the ID
    /// outside of RAM.
    pub fn renew(&self, id: Uuid) -> anyhow::Result<()> {
        let shared = &self.board.shared;
        self.generation.change(id, &shared.memory, &shared.buttons)
    }

    /// The devices' connections to the operator and the screen.
    pub fn shared(&self) -> &Shared {
        &self.board.shared
    }

    /// Pauses all processors, and sends a non-maskable interrupt to the first.
    pub fn nmi(&self) -> anyhow::Result<()> {
        self.processors.pause();
        self.processors.each().next().map_or(Ok(()), |vcpu| vcpu.nmi())
    }

    /// The processors must be paused.
    pub fn registers(&self) -> Vec<String> {
        self.processors.each().map(|vcpu| vcpu.registers()).collect()
    }
}
