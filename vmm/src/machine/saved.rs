//! Saves a machine, and builds it again from what was saved.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::Arc;
use std::thread::{Builder, sleep};
use std::time::Duration;
use std::{io, mem};

use anyhow::{Context, bail, ensure};
use devices::board::Board;
use devices::device;
use devices::grants::Claim;
use devices::registry;
use host::gate::Gate;
use host::ram::{GuestRegionMmap, MmapRegion};
use host::uuid::Uuid;
use kvm_bindings::kvm_cpuid_entry2 as Leaf;
use vm_memory::{GuestMemoryBackend as _, VolatileMemory as _};

use super::{Machine, Plan};
use crate::config::{Cloning, Config, Restore};
use crate::cpuid;
use crate::kvm::vcpu::Vcpu;
use crate::kvm::vm::Vm;
use crate::migration::Hello;
use crate::migration::pages::Outgoing;
use crate::ram;
use crate::snapshot::memory::{Before, Limit};
use crate::snapshot::{
    self, Contents, Mark, Moment, Origin, Saved, Snapshot, Stored, Target, Then, memory, refused,
};

/// The devices of a board, each with its claims.
pub(super) fn layout(board: &Board) -> Vec<(String, Vec<String>)> {
    let device = |(name, claims): (&str, &[Claim])| {
        (name.to_owned(), claims.iter().map(ToString::to_string).collect())
    };
    board.claims().map(device).collect()
}

/// The machine as it was built, which a snapshot describes.
pub(super) struct Built {
    /// The devices of the configuration, each with its claims.
    pub(super) layout: Vec<(String, Vec<String>)>,
    /// The configured files of disks and drives, by the names of their devices.
    pub(super) files: BTreeMap<String, PathBuf>,
    /// The CPUID leaves of each processor.
    pub(super) cpuid: Vec<Vec<Leaf>>,
    /// The configured VM Generation ID.
    pub(super) generation: Option<String>,
}

/// Memory with the contents of a snapshot, which are not checked yet.
pub struct Unchecked {
    pub origin: Arc<Origin>,
    /// The number of its parts that are RAM.
    pub parts: usize,
    pub restore: Restore,
    /// It stays closed until they are checked.
    pub gate: Arc<Gate>,
}

/// How long a restored guest runs before its timer is set up.
const FIRST_MOMENT: Duration = Duration::from_millis(100);

/// The kind of devices whose state is in hardware.
const HARDWARE: &str = "usb-host";

/// The configured files of disks and drives, by the names of their devices.
pub(super) fn files(plan: &Plan) -> BTreeMap<String, PathBuf> {
    let mut counts = BTreeMap::<_, usize>::new();
    let mut files = BTreeMap::new();
    for device in plan.devices() {
        let count = counts.entry(device.kind()).or_default();
        *count += 1;
        if let Some(path) = device.file() {
            files.insert(registry::name(device.kind(), *count), path.to_owned());
        }
    }
    files
}

/// The files as they are now: before they are opened, which may change them, for a comparison, or
/// those that are `open` by the names of their devices.
pub(super) fn marks(
    files: &BTreeMap<String, PathBuf>,
    config: &Config,
    open: impl Fn(&str) -> io::Result<Option<Metadata>>,
) -> anyhow::Result<Vec<Mark>> {
    let mut marks = Vec::new();
    for (name, path) in files {
        marks.push(match open(name).with_context(|| path.display().to_string())? {
            Some(found) => Mark::new(name.clone(), &found),
            None => Mark::of(name, path)?,
        });
    }
    if let Some(path) = &config.vars {
        marks.push(Mark::of("--vars", path)?);
    }
    Ok(marks)
}

impl Snapshot {
    /// The saved features of each processor, if this host has them.
    pub(super) fn cpuid(&self, plan: &Plan) -> anyhow::Result<Vec<Vec<Leaf>>> {
        let saved = &self.saved.cpuid;
        refused(compare_cpuid(saved, plan).and_then(|()| {
            let complete = self.saved.moment.processors.len() == saved.len();
            ensure!(complete, "it does not have the state of each processor");
            Ok(saved.clone())
        }))
    }
}

/// Fails if this host lacks features of the saved processors.
pub(super) fn compare_cpuid(saved: &[Vec<Leaf>], plan: &Plan) -> anyhow::Result<()> {
    ensure!(
        saved.len() == plan.apic_ids.len(),
        "its guest has {} processors, and this machine {}: start it with `--cpus {}`",
        saved.len(),
        plan.apic_ids.len(),
        saved.len()
    );
    for (index, saved) in (0..).zip(saved) {
        cpuid::check(saved, plan.model.of(index)?.as_slice())?;
    }
    Ok(())
}

impl Machine {
    /// Saves the machine to these files, and returns the parts of memory. The processors must be
    /// paused. The devices stay parked until `unpark`, so that its disks do not change.
    pub fn save(
        &mut self,
        target: Target<'_>,
        then: Then,
        limit: Limit,
    ) -> anyhow::Result<Vec<memory::Part>> {
        self.can_be_saved(then)?;
        self.stand_still()?;
        let memory = self.save_memory(target, limit).context("memory")?;
        self.add_late_interrupts()?;
        limit.check()?;
        let saved = self.describe(then, memory)?;
        self.saved = true;
        let written = saved.write(target.machine, target.cipher);
        self.parked = Some(saved.moment);
        written.map(|()| saved.memory)
    }

    /// All but the contents of memory. The caller gives the moment back, at which the machine is
    /// parked.
    fn describe(&mut self, then: Then, memory: Vec<memory::Part>) -> anyhow::Result<Saved> {
        let files = self.files()?;
        let Some(moment) = self.parked.take() else { bail!("the machine is not parked") };
        let (config, cpuid) = (portable(&self.config), self.built.cpuid.clone());
        let (layout, generation) = (self.built.layout.clone(), self.generation.show());
        // If the process of a machine that is asleep ends, the machine has ended with its snapshot.
        let then = if then == Then::Sleep { Then::Quit } else { then };
        Ok(Saved { config, then, layout, cpuid, moment, generation, files, memory })
    }

    /// The description of a machine that departs, for the other end.
    pub fn hello(&self) -> anyhow::Result<Vec<u8>> {
        self.can_be_saved(Then::Quit)?;
        let (config, cpuid) = (portable(&self.config), self.built.cpuid.clone());
        let parts = self.mappings().map(|it| it.size() as u64).collect();
        Ok(serde_json::to_vec(&Hello { format: snapshot::FORMAT, config, cpuid, parts })?)
    }

    /// The contents of memory, to be sent.
    pub fn contents(&self) -> Outgoing {
        let ram = self.ram.iter().map(GuestRegionMmap::get_mmap).collect();
        let devices = self.vm.device_memory().into_iter().map(|it| it.contents()).collect();
        Outgoing::new(ram, devices, self.pages.clone())
    }

    /// The state of a machine that departs and stands still. `paused`: its processors wait.
    pub fn state(&mut self, paused: bool) -> anyhow::Result<(Vec<u8>, Vec<Mark>)> {
        // The guest may have ejected a medium since.
        self.can_be_saved(Then::Quit)?;
        self.add_late_interrupts()?;
        let then = if paused { Then::Pause } else { Then::Quit };
        let parts = self.mappings().map(|it| memory::Part::sent(it.size() as u64)).collect();
        let saved = self.describe(then, parts)?;
        let state = serde_json::to_vec(&saved);
        self.parked = Some(saved.moment);
        Ok((state?, saved.files))
    }

    /// The files of its disks, as they are now.
    pub fn files(&self) -> anyhow::Result<Vec<Mark>> {
        Ok([self.current_marks()?, self.marks_below()?].concat())
    }

    /// Begins or ends recording of the pages of RAM that are written. When it begins, the machine
    /// must be parked.
    pub fn record_writes(&self, on: bool) -> anyhow::Result<Arc<Vm>> {
        self.vm.record_writes(on)?;
        Ok(self.vm.clone())
    }

    /// Gives the memory back to the host, after `save`: until it is used again, it is in this file.
    pub fn sleep(&mut self, file: File, parts: Vec<memory::Part>) -> anyhow::Result<()> {
        // Before the first region is mapped, because the next snapshot relies on it.
        let origin = self.origin.insert(Arc::new(Origin { file, parts }));
        ram::sleep(&self.ram, &origin.file).context("the guest's memory cannot be returned")
    }

    /// Parks the devices until `unpark`, and makes the disks durable. Processors must be paused.
    pub fn stand_still(&mut self) -> anyhow::Result<()> {
        self.can_stand_still()?;
        if self.parked.is_none() {
            self.board.gather()?;
        }
        self.freeze()?;
        self.complete_disks()?;
        self.add_late_interrupts()
    }

    /// Parks the devices until `unpark`, and stops the guest's clocks, to go on in this process.
    /// Processors must be paused, and the machine able to stand still.
    pub fn freeze(&mut self) -> anyhow::Result<()> {
        if self.parked.is_none() {
            self.parked = Some(self.park_all()?);
        }
        Ok(())
    }

    /// An interrupt that a device sent before it was parked may reach its processor late.
    fn add_late_interrupts(&mut self) -> anyhow::Result<()> {
        let states = self.parked.iter_mut().flat_map(|moment| &mut moment.processors);
        for (vcpu, (state, _)) in self.processors.each().zip(states) {
            vcpu.add_interrupts(state)?;
        }
        Ok(())
    }

    /// Makes the disks durable: the snapshot must not be on the disk before the writes that its
    /// guest relies on. The devices are parked, so that no more come.
    fn complete_disks(&self) -> anyhow::Result<()> {
        for disk in self.board.shared.disks.all() {
            disk.image.complete().with_context(|| disk.path.display().to_string())?;
        }
        Ok(())
    }

    /// The files as they are now. In its jail, the process may have no right to open them again.
    fn current_marks(&self) -> anyhow::Result<Vec<Mark>> {
        let disks = &self.board.shared.disks;
        let mut open: Vec<_> = disks.all().iter().map(|it| (it.name.clone(), it.clone())).collect();
        open.extend(
            disks.trays().iter().filter_map(|it| Some((it.name().to_owned(), it.medium()?))),
        );
        marks(&self.built.files, &self.config, |name| {
            let drive = open.iter().find(|it| it.0 == name);
            let file = drive.and_then(|(_, drive)| drive.image.file());
            file.map(|it| it.file.metadata()).transpose()
        })
    }

    /// Fails if a part of the state is lost at the end, or if the machine is no longer the
    /// configured one.
    fn can_be_saved(&self, then: Then) -> anyhow::Result<()> {
        let present: Vec<_> = self.board.claims().map(|(name, _)| name).collect();
        ensure!(
            then != Then::Sleep || self.config.memory.hugepages.is_none(),
            "memory in huge pages (`hugepages=`) cannot be returned: do without them, or suspend \
             the machine instead"
        );
        let configured: Vec<_> = self.built.layout.iter().map(|(name, _)| name.as_str()).collect();
        if let Some(name) = present.iter().find(|name| !configured.contains(name)) {
            bail!(
                "{name} was plugged in while the machine ran: unplug it first (`vmm ctl detach`)"
            );
        }
        if let Some(name) = configured.iter().find(|name| !present.contains(name)) {
            bail!("{name} was unplugged while the machine ran: it can be saved after a restart");
        }
        for tray in self.board.shared.disks.trays() {
            let (name, medium) = (tray.name(), tray.medium());
            let medium = medium.as_ref().map(|drive| &drive.path);
            ensure!(
                medium == self.built.files.get(name),
                "{name} has another medium than at the start: change it back first (`vmm ctl \
                 eject`, `vmm ctl insert`)"
            );
        }
        let disks = self.board.shared.disks.all();
        match disks.iter().find(|disk| !disk.image.keeps_writes()) {
            Some(disk) => bail!(
                "{}: with `overlay=on` its writes are in no file, and are lost at the end: shut \
                 the guest down instead",
                disk.name
            ),
            None => Ok(()),
        }
    }

    /// Fails if a part of the state is in hardware.
    pub fn can_stand_still(&self) -> anyhow::Result<()> {
        for (name, _) in self.board.claims() {
            let kind = name.split('.').next().unwrap_or_default();
            ensure!(
                kind != HARDWARE,
                "{name}: a USB device of the host is not saved: detach it first"
            );
        }
        ensure!(
            !self.config.features.nested,
            "the state of virtual machines in the guest (`--features nested`) is not saved yet: \
             shut the guest down instead"
        );
        Ok(())
    }

    fn park_all(&self) -> anyhow::Result<Moment> {
        let first = self.processors.each().next().context("a machine without processors")?;
        let (clock, now) = first.clock(&self.vm)?;
        drop(first);
        self.board.shared.time.stop(now);
        let devices = self.board.park();
        let taken = (|| {
            let processors = self.processors.each().map(|vcpu| vcpu.state());
            anyhow::Ok((processors.collect::<anyhow::Result<_>>()?, self.vm.state(clock)?))
        })();
        match taken {
            Ok((processors, vm)) => {
                let hyperv = self.processors.hyperv().map(|hyperv| hyperv.state());
                Ok(Moment { processors, vm, hyperv, devices })
            }
            Err(error) => {
                self.run_devices(devices)?;
                Err(error)
            }
        }
    }

    fn run_devices(&self, devices: Vec<(String, device::Saved)>) -> anyhow::Result<()> {
        let ran = self.board.run(devices);
        if self.direct.is_some() {
            // fw_cfg has the address from firmware, of which there is none.
            self.generation.started_directly();
        }
        self.board.shared.time.go_on();
        ran
    }

    /// Lets the machine continue where it was saved. `resume` starts the processors.
    pub fn unpark(&mut self) -> anyhow::Result<()> {
        self.add_late_interrupts()?;
        self.take_moment().map_or(Ok(()), |moment| self.continue_from(moment))
    }

    /// The moment at which the machine is parked, and from which it goes on now.
    pub(super) fn take_moment(&mut self) -> Option<Moment> {
        if mem::take(&mut self.saved) {
            self.board.shared.disks.disown_snapshot();
        }
        self.parked.take()
    }

    fn continue_from(&self, moment: Moment) -> anyhow::Result<()> {
        self.set_state(&moment)?;
        self.run_devices(moment.devices)
    }

    /// The state of all but devices, and the time of their clocks.
    fn set_state(&self, moment: &Moment) -> anyhow::Result<()> {
        let all: Vec<_> = self.processors.each().collect();
        let mut first = None;
        for (vcpu, (_, tsc)) in all.iter().zip(&moment.processors) {
            let now = vcpu.restore_tsc(&self.vm, *tsc, first)?;
            first.get_or_insert((*tsc, now));
        }
        let vcpus: Vec<&Vcpu> = all.iter().map(|vcpu| &**vcpu).collect();
        self.vm.restore(&moment.vm)?;
        let began = Vcpu::continue_clock(&self.vm, &vcpus, moment.vm.clock)?;
        for (vcpu, (state, _)) in all.iter().zip(&moment.processors) {
            vcpu.restore(state)?;
        }
        if let (Some(hyperv), Some(state)) = (self.processors.hyperv(), &moment.hyperv) {
            hyperv.restore(*state);
        }
        self.board.shared.time.stop(began);
        Ok(())
    }

    /// Whether the devices are parked, since the machine was saved.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Continues from a snapshot, after `build` with it. `resume` starts the processors.
    pub fn restore(&mut self, snapshot: Snapshot) -> anyhow::Result<()> {
        self.fill_device_memory(&snapshot)?;
        let Saved { moment, generation, then, files, memory: parts, .. } = snapshot.saved;
        let moved = matches!(snapshot.memory, Contents::Received(_));
        // Encrypted memory was copied, and nothing relies on its file.
        if let Contents::File(Stored { file, cipher: None, .. }) = snapshot.memory {
            self.origin = Some(Arc::new(Origin { file, parts }));
        }
        self.settle_timer()?;
        self.board.park();
        self.fresh = false;
        if moved {
            // It is parked until the other end cannot go on.
            self.set_state(&moment)?;
            self.parked = Some(moment);
        } else {
            self.continue_from(moment)?;
        }
        // A machine that ended with its snapshot goes on once: its disks show that. Others may be
        // copies.
        let goes_on_once = files.iter().any(Mark::shows_changes);
        let before = Uuid::from_str(&generation)?;
        let now = match &self.built.generation {
            // It is one machine, whose devices do not run yet.
            _ if moved => before,
            Some(id) => Uuid::from_str(id)?,
            None if then == Then::Quit && goes_on_once && !self.is_clone() => before,
            None => Uuid::random()?,
        };
        self.generation.restore(before);
        if now != before
            && let Err(error) = self.renew(now)
        {
            tracing::warn!("the guest does not learn of its new VM Generation ID: {error:#}");
        }
        Ok(())
    }

    /// Nothing that could fail is left, and a restored machine's devices may write.
    pub fn started(&self) {
        let disks = self.board.shared.disks.clone();
        // Also one at the end from which a machine came. A clone writes to no file of its snapshot.
        let goes_on = self.config.restore.is_some() || self.config.incoming.is_some();
        let has_snapshot = goes_on && !self.is_clone();
        disks.gate().started(move || {
            if has_snapshot {
                disks.disown_snapshot();
            }
        });
    }

    /// Sets the timer (PIT) of a restored machine up, when the guest has run for a moment: it has
    /// hardly a use for it, and first of all it should run.
    fn settle_timer(&self) -> anyhow::Result<()> {
        let vm = self.vm.clone();
        let body = move || {
            sleep(FIRST_MOMENT);
            if let Err(error) = vm.discard_lost_ticks() {
                tracing::warn!("ticks that the guest misses are delivered late: {error:#}");
            }
        };
        Builder::new().name("timer".into()).spawn(body).context("a thread")?;
        Ok(())
    }

    /// The machine's memory, if it must be checked yet.
    pub fn unchecked(&self) -> Option<Unchecked> {
        let (origin, restore) = (self.origin.clone()?, self.config.restore.as_ref()?);
        let gate = self.board.shared.disks.gate();
        // The memory of devices was checked when it was read.
        let (parts, restore) = (self.ram.num_regions(), restore.clone());
        gate.is_unchecked().then_some(Unchecked { origin, parts, restore, gate })
    }

    fn fill_device_memory(&self, snapshot: &Snapshot) -> anyhow::Result<()> {
        let regions = self.ram.num_regions();
        let places = memory::places(&snapshot.saved.memory).skip(regions);
        for (index, (backing, (at, part))) in self.vm.device_memory().iter().zip(places).enumerate()
        {
            let contents = backing.overwrite();
            match &snapshot.memory {
                Contents::File(stored) => {
                    let read = stored.read(at, part, &contents);
                    refused(read.context("memory of a device"))?;
                }
                Contents::Received(received) => {
                    for (offset, page) in received.devices.get(index).into_iter().flatten() {
                        let whole = contents.as_volatile_slice();
                        let place = whole.subslice(*offset, page.len());
                        place.context("memory of a device")?.copy_from(page);
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails if the snapshot is of another machine, or if its disks have changed. Nothing has
    /// changed yet.
    pub(super) fn check(&self, saved: &Saved, marks: Vec<Mark>) -> anyhow::Result<()> {
        refused(self.fits(saved, marks))
    }

    fn fits(&self, saved: &Saved, marks: Vec<Mark>) -> anyhow::Result<()> {
        compare(&saved.layout, &self.built.layout)?;
        let sizes = self.mappings().map(|region| region.size() as u64);
        ensure!(
            sizes.eq(saved.memory.iter().map(|part| part.bytes)),
            "the snapshot has other parts of memory than this machine: start it with `--memory \
             {}`, and with the same display",
            saved.config.memory.size
        );
        ensure!(
            saved.moment.hyperv.is_some() == self.processors.hyperv().is_some(),
            "the snapshot has another interface of Hyper-V than this host gives: start it with \
             `--hyperv {}`",
            if saved.moment.hyperv.is_some() { "own" } else { "kvm" }
        );
        let marks = match self.is_clone() {
            true => self.marks_of_clone(marks)?,
            false => [marks, self.marks_below()?].concat(),
        };
        Mark::compare(&saved.files, &marks)
    }

    fn is_clone(&self) -> bool {
        self.config.restore.as_ref().is_some_and(|it| it.clone != Cloning::Off)
    }

    /// The files that disks are based on. They are never written, not even when they are opened.
    fn marks_below(&self) -> anyhow::Result<Vec<Mark>> {
        let mut marks = Vec::new();
        for disk in self.board.shared.disks.all() {
            let below = disk.image.below().with_context(|| disk.path.display().to_string())?;
            marks.extend(Mark::below(&disk.name, &below.files, 1));
        }
        Ok(marks)
    }

    /// All mappings with contents: RAM, then the memory of devices.
    fn mappings(&self) -> impl Iterator<Item = Arc<MmapRegion>> {
        let ram = self.ram.iter().map(GuestRegionMmap::get_mmap);
        ram.chain(self.vm.device_memory().into_iter().map(|it| it.contents()))
    }

    fn save_memory(&self, to: Target<'_>, limit: Limit) -> anyhow::Result<Vec<memory::Part>> {
        let places = self.origin.iter().flat_map(|origin| {
            let places = memory::places(&origin.parts);
            places.map(|(at, part)| Before::Saved(&origin.file, at, part))
        });
        let places = places.map(Some).chain(std::iter::repeat(None));
        let mut at = 0;
        let mut parts = Vec::new();
        let mut file = memory::Writer::new(to.memory, to.cipher, limit);
        for (region, before) in self.mappings().zip(places) {
            let before = before.filter(|_| ram::is_saved(&region)).unwrap_or(Before::Zeros);
            let part = memory::write(&mut file, at, &region, &self.pages, before)?;
            at += part.bytes;
            parts.push(part);
        }
        file.finish(at)?;
        Ok(parts)
    }
}

/// The configuration without what belongs to one process or one life.
pub(super) fn portable(config: &Config) -> Config {
    Config {
        restore: None,
        incoming: None,
        vmgenid: None,
        die_with: Default::default(),
        ..config.clone()
    }
}

/// Fails if the devices of a snapshot and of a machine are not the same.
fn compare(
    saved: &[(String, Vec<String>)],
    machine: &[(String, Vec<String>)],
) -> anyhow::Result<()> {
    let same = "give all devices as they were, in the same order, or none";
    for (name, claims) in saved {
        let Some((_, ours)) = machine.iter().find(|it| it.0 == *name) else {
            bail!("the snapshot has `{name}`, and this machine does not: {same}");
        };
        let different = claims.iter().find(|it| !ours.contains(it));
        if let Some(claim) = different.or_else(|| ours.iter().find(|it| !claims.contains(it))) {
            bail!("`{name}` differs from the snapshot's in `{claim}`: {same}");
        }
    }
    match machine.iter().find(|it| !saved.iter().any(|other| other.0 == it.0)) {
        Some((name, _)) => bail!("this machine has `{name}`, and the snapshot does not: {same}"),
        None => Ok(()),
    }
}
