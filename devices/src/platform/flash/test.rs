//! Tests of `flash`.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::thread;

use super::*;
use crate::hypervisor::Hypervisor;
use crate::testutil::Bench;

const CODE: u64 = END - 0x4000;
const VARS_SIZE: usize = 0x10000;
const VARS: u64 = CODE - VARS_SIZE as u64;

/// A CODE image and a VARS image in a temporary folder.
struct Images {
    folder: tempfile::TempDir,
}

impl Images {
    fn new() -> Self {
        let images = Self { folder: tempfile::tempdir().unwrap() };
        let mut code = vec![0x90; 0x4000];
        code[0x3ff0..].copy_from_slice(&[0xea; 16]);
        fs::write(images.code(), code).unwrap();
        fs::write(images.vars(), blank_vars()).unwrap();
        images
    }

    fn code(&self) -> PathBuf {
        self.folder.path().join("CODE.fd")
    }

    fn vars(&self) -> PathBuf {
        self.folder.path().join("VARS.fd")
    }

    fn config(&self) -> Config {
        Config { code: self.code(), vars: Some(self.vars()), readonly: false, smm: false }
    }
}

fn blank_vars() -> Vec<u8> {
    let mut vars = vec![0xff; VARS_SIZE];
    vars[..FV_GUID].fill(0);
    vars[FV_GUID..][..16].copy_from_slice(&NV_DATA);
    vars[FV_LENGTH..][..8].copy_from_slice(&(VARS_SIZE as u64).to_le_bytes());
    vars[FV_SIGNATURE..][..4].copy_from_slice(b"_FVH");
    vars
}

fn try_bench(config: Config) -> anyhow::Result<Bench> {
    let mut bench = Bench::new(4096);
    bench.board.add("flash", |grants| config.build(grants))?;
    bench.board.run(Vec::new())?;
    Ok(bench)
}

fn bench(config: Config) -> Bench {
    try_bench(config).unwrap()
}

fn write(bench: &Bench, address: u64, bytes: &[u8]) {
    for byte in bytes {
        bench.write(Kind::Memory, address, &[*byte]);
    }
}

fn read(bench: &Bench, address: u64) -> u8 {
    bench.read::<1>(Kind::Memory, address)[0]
}

/// OVMF's `QemuFlashDetected` of Debian 12, then of Debian 13. Returns the last status.
fn probe(bench: &Bench, at: u64) -> u8 {
    let original = read(bench, at);
    assert!(![CLEAR_STATUS, READ_STATUS, 0].contains(&original));
    write(bench, at, &[CLEAR_STATUS]);
    assert_eq!(read(bench, at), original, "not RAM");
    write(bench, at, &[READ_STATUS]);
    assert_eq!(read(bench, at), 0, "not ROM");
    write(bench, at, &[PROGRAM, original, READ_STATUS]);
    let status = read(bench, at);
    write(bench, at, &[0xff]);
    assert_eq!(read(bench, at), original);
    status
}

#[test]
fn firmware_finds_vars_writable_and_code_write_protected() {
    let images = Images::new();
    let bench = bench(images.config());
    assert_eq!(probe(&bench, VARS + 0x10), STATUS_READY);
    assert_eq!(probe(&bench, CODE + 0x10), STATUS_READY | STATUS_PROGRAM_ERROR);
    assert_eq!(fs::read(images.vars()).unwrap(), blank_vars());
    assert_eq!(read(&bench, END - 16), 0xea, "the reset vector is where it belongs");
    assert_eq!(read(&bench, VARS - 1), 0xff);
}

#[test]
fn programs_and_erases_reach_the_file_at_once_and_persist() {
    let images = Images::new();
    let bench = bench(images.config());
    write(&bench, VARS + 0x5123, &[PROGRAM, 0x5a]);
    write(&bench, VARS + 0x6000, &[PROGRAM, READ_STATUS]);
    write(&bench, VARS + 0x6001, &[PROGRAM, 0]);
    assert_eq!(read(&bench, VARS + 0x6000), READ_STATUS, "data is not a command");
    write(&bench, VARS + 0x6fff, &[ERASE, ERASE_CONFIRM]);
    assert_eq!(read(&bench, VARS + 0x6000), 0xff, "the array, without being asked");
    let mut expected = blank_vars();
    expected[0x5123] = 0x5a;
    assert_eq!(fs::read(images.vars()).unwrap(), expected);
    drop(bench);
    let bench = self::bench(images.config());
    assert_eq!(read(&bench, VARS + 0x5123), 0x5a);
}

#[test]
fn code_is_never_written() {
    let images = Images::new();
    let before = fs::read(images.code()).unwrap();
    let bench = bench(images.config());
    write(&bench, CODE + 0x10, &[PROGRAM, 1, ERASE, ERASE_CONFIRM, READ_STATUS]);
    let all = STATUS_READY | STATUS_PROGRAM_ERROR | STATUS_ERASE_ERROR;
    assert_eq!(read(&bench, CODE + 0x10), all);
    write(&bench, CODE + 0x10, &[CLEAR_STATUS, READ_STATUS]);
    assert_eq!(read(&bench, CODE + 0x10), 0);
    write(&bench, CODE + 0x10, &[0xff]);
    assert_eq!(read(&bench, CODE + 0x10), 0x90);
    assert_eq!(fs::read(images.code()).unwrap(), before);
}

#[test]
fn other_widths_offsets_and_commands_stay_within_the_chip() {
    let images = Images::new();
    let bench = bench(images.config());
    let at = VARS + 0x7001;
    bench.write(Kind::Memory, at, &[PROGRAM, 0xaa, 0xbb, 0xcc]);
    bench.write(Kind::Memory, at, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bench.read(Kind::Memory, at), [1, 2, 3, 4, 5, 6, 7, 8, 0xff]);
    bench.write(Kind::Memory, at, &[READ_STATUS, 0]);
    assert_eq!(bench.read(Kind::Memory, at), [0x80, 0x80, 3]);
    // An access across both chips, and an erase that is not confirmed.
    bench.write(Kind::Memory, CODE - 2, &[PROGRAM, 0, 0, 0]);
    assert_eq!(bench.read(Kind::Memory, at), [0x80, 0x80, 3], "the write has no effect");
    write(&bench, at, &[ERASE, 0xff, 0x98, 0xe8, 0x90]);
    assert_eq!(bench.read(Kind::Memory, at), [1, 2, 3]);
    write(&bench, CODE - 1, &[ERASE, ERASE_CONFIRM]);
    write(&bench, CODE - 1, &[PROGRAM, 9]);
    assert_eq!(bench.read(Kind::Memory, CODE - 1), [9]);
    assert_eq!(bench.read(Kind::Memory, CODE), [0x90]);
}

#[test]
fn random_writes_change_only_programmed_or_erased_bytes() {
    let images = Images::new();
    let bench = bench(images.config());
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..50_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [low, _, width, command, ..] = state.to_le_bytes();
        let data = state.to_be_bytes();
        let commands = [PROGRAM, ERASE, ERASE_CONFIRM, CLEAR_STATUS, READ_STATUS, low];
        let mut data = data[..usize::from(width % 8) + 1].to_vec();
        data[0] = commands[usize::from(command) % commands.len()];
        bench.write(Kind::Memory, VARS + (state >> 32) % (VARS_SIZE as u64 + 0x4000), &data);
    }
    bench.board.park();
    let mut seen = vec![0; VARS_SIZE];
    bench.board.shared.spaces.memory.read(VARS, &mut seen);
    assert_eq!(seen, fs::read(images.vars()).unwrap());
    assert_ne!(seen, blank_vars());
    let mut code = vec![0; 0x4000];
    bench.board.shared.spaces.memory.read(CODE, &mut code);
    assert_eq!(code, fs::read(images.code()).unwrap());
}

#[test]
fn park_keeps_the_mode_and_reset_returns_to_array_mode() {
    let images = Images::new();
    let bench = bench(images.config());
    let at = VARS + 0x8000;
    write(&bench, at, &[PROGRAM, 0x11, READ_STATUS]);
    let saved = bench.board.park();
    assert_eq!(read(&bench, at), 0x11, "a parked chip has no status in its array");
    bench.board.run(saved.clone()).unwrap();
    assert_eq!(read(&bench, at), 0x80);
    assert_eq!(bench.board.park(), saved);
    bench.board.run(saved).unwrap();
    write(&bench, at, &[PROGRAM]);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    write(&bench, at, &[0x22]);
    assert_eq!(read(&bench, at), 0x22, "half a command is a part of the state");
    write(&bench, at, &[READ_STATUS]);
    bench.board.reset().unwrap();
    assert_eq!(read(&bench, at), 0x22);
    write(&bench, at, &[READ_STATUS]);
    assert_eq!(read(&bench, at), 0, "the status is clear after power-on");
}

#[test]
fn readonly_writes_are_discarded_and_need_no_lock() {
    let images = Images::new();
    let readonly = || bench(Config { readonly: true, ..images.config() });
    let (one, two) = (readonly(), readonly());
    assert_eq!(probe(&one, VARS + 0x10), STATUS_READY);
    write(&one, VARS + 0x5000, &[PROGRAM, 0x33]);
    one.board.reset().unwrap();
    assert_eq!((read(&one, VARS + 0x5000), read(&two, VARS + 0x5000)), (0x33, 0xff));
    let _writer = bench(images.config());
    drop(one);
    assert_eq!(fs::read(images.vars()).unwrap(), blank_vars());
}

#[test]
fn an_unwritable_file_keeps_its_content_and_is_updated_later() {
    let images = Images::new();
    let mut bench = Bench::new(4096);
    let build = |grants: &mut dyn Grants| {
        let bytes = blank_vars();
        // Opened read-only: each write fails.
        let file = open(&images.vars(), false)?;
        let store = Store::new(&images.vars(), file, bytes.len() as u64);
        let code = Bank::new(CODE, &[0; 0x4000], (Writes::Refused, Kind::Memory), grants)?;
        let vars = Some(Bank::new(VARS, &bytes, (Writes::File(store), Kind::Memory), grants)?);
        Ok(Box::new(Flash { code, vars }) as Box<dyn Device>)
    };
    bench.board.add("flash", build).unwrap();
    bench.board.run(Vec::new()).unwrap();
    write(&bench, VARS + 0x5000, &[PROGRAM, 0x44, READ_STATUS]);
    assert_eq!(read(&bench, VARS + 0x5000), STATUS_READY | STATUS_PROGRAM_ERROR);
    write(&bench, VARS + 0x5000, &[0xff]);
    assert_eq!(read(&bench, VARS + 0x5000), 0x44, "the guest continues in memory");
    assert_eq!(fs::read(images.vars()).unwrap(), blank_vars());

    // The next process, to whose memory the contents came, knows what its file lacks.
    let saved = bench.board.park();
    let next = try_bench(images.config()).unwrap();
    next.board.park();
    let mut behind = blank_vars();
    behind[0x5000] = 0x11;
    fs::write(images.vars(), &behind).unwrap();
    next.board.run(saved).unwrap();
    write(&next, VARS + 0x6000, &[PROGRAM, 0x55]);
    (behind[0x5000], behind[0x6000]) = (0xff, 0x55);
    assert_eq!(fs::read(images.vars()).unwrap(), behind);
    drop(next);
    fs::write(images.vars(), blank_vars()).unwrap();

    let view = bench.hypervisor.backing(VARS_SIZE as u64, GuestAccess::ReadOnly).unwrap();
    view.write(0, &blank_vars());
    let mut store = Store::new(&images.vars(), open(&images.vars(), false).unwrap(), 0x10000);
    let data = [1, 2];
    for offset in [0x4fff, 0x9000] {
        view.write(offset, &data);
        assert!(!store.write(offset, &data, view.as_ref()));
    }
    assert_eq!(store.outdated, BTreeSet::from([4, 5, 9]));
    Arc::get_mut(&mut store.file).unwrap().file = Arc::new(open(&images.vars(), true).unwrap());
    view.write(0xa000, &data);
    assert!(store.write(0xa000, &data, view.as_ref()));
    let mut expected = blank_vars();
    for offset in [0x4fff, 0x9000, 0xa000] {
        expected[offset..][..2].copy_from_slice(&data);
    }
    assert_eq!(fs::read(images.vars()).unwrap(), expected);
}

#[test]
fn refuses_files_that_are_not_firmware_or_a_variable_store() {
    let images = Images::new();
    let path = |name: &str| images.folder.path().join(name);
    let file = |name: &str, bytes: &[u8]| {
        fs::write(path(name), bytes).unwrap();
        path(name)
    };
    let code = |code: PathBuf| Config { code, ..images.config() };
    let vars = |vars: PathBuf| Config { vars: Some(vars), ..images.config() };
    let mut cut = blank_vars();
    cut.truncate(0x8000);
    for (config, why) in [
        (code(path("none")), "none: No such file"),
        (code(path("")), "is a directory, not a flash image"),
        (code(PathBuf::from("/dev/zero")), "/dev/zero is not a file"),
        (code(file("empty", &[])), "empty is empty"),
        (code(file("odd", &[1; 4097])), "odd has 4097 bytes: the size of a flash image"),
        (code(file("ones", &[0xff; 4096])), "ones is not firmware: its last 16 bytes"),
        (code(file("zeros", &[0; 4096])), "are all 0x00"),
        (code(file("large", &vec![1; (16 << 20) + 4096])), "has 16781312 bytes"),
        (code(file("full", &vec![1; 16 << 20])), "16842752 bytes together"),
        (vars(images.code()), "CODE.fd is not a variable store"),
        (vars(file("short", &cut)), "has 32768 bytes, but the variable store in it has"),
        // A file of the kernel, because the test may run as root, which ignores file modes.
        (vars("/sys/devices/system/cpu/online".into()), "is not writable: make a copy"),
    ] {
        let error = format!("{:#}", try_bench(config).err().unwrap());
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn accepts_a_store_with_a_torn_first_block_and_a_good_spare() {
    let images = Images::new();
    let mut vars = blank_vars();
    vars.copy_within(..BLOCK_BYTES, 0x8000);
    vars[..BLOCK_BYTES].fill(0xff);
    fs::write(images.vars(), vars).unwrap();
    bench(images.config());
}

/// Environment variable that passes the folder of the images to a child process.
const CHILD: &str = "FLASH_TEST_IMAGES";

/// The `number`th action of a child: the offset, and the byte to program, or `None` for an
/// erase. No action touches the first block, so that the file remains a variable store.
fn work(number: u64) -> (u64, Option<u8>) {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let offset = BLOCK + (mixed >> 20) % (VARS_SIZE as u64 - BLOCK);
    (offset, (number % 600 != 599).then_some(mixed.to_le_bytes()[7]))
}

/// The child's work until it is killed. It ends by itself when the parent must have ended.
fn work_on(folder: &Path) {
    let (code, vars) = (folder.join("CODE.fd"), Some(folder.join("VARS.fd")));
    let bench = bench(Config { code, vars, readonly: false, smm: false });
    let end = Instant::now() + Duration::from_secs(60);
    for number in (0..).take_while(|_| Instant::now() < end) {
        let (offset, byte) = work(number);
        let commands = byte.map_or([ERASE, ERASE_CONFIRM], |byte| [PROGRAM, byte]);
        write(&bench, VARS + offset, &commands);
    }
}

/// Runs this test in a child process that works on the images, and waits until it has started.
fn child(test: &str, images: &Images) -> Child {
    let before = fs::read(images.vars()).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("platform::flash::test::{test}")])
        .env(CHILD, images.folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while fs::read(images.vars()).unwrap() == before {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it wrote");
        thread::sleep(Duration::from_millis(1));
    }
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9), "killed at work");
}

#[test]
fn a_kill_leaves_the_file_in_a_consistent_state() {
    if let Some(folder) = std::env::var_os(CHILD) {
        return work_on(Path::new(&folder));
    }
    for round in 0..8 {
        let images = Images::new();
        let child = child("a_kill_leaves_the_file_in_a_consistent_state", &images);
        thread::sleep(Duration::from_millis(round * 9));
        kill(child);
        let left = fs::read(images.vars()).unwrap();
        let mut model = blank_vars();
        let mut wrong = model.iter().zip(&left).filter(|(one, other)| one != other).count();
        assert_ne!(wrong, 0);
        let mut change = |at: usize, byte| {
            wrong -= usize::from(model[at] != left[at]);
            model[at] = byte;
            wrong += usize::from(model[at] != left[at]);
            wrong == 0
        };
        let moment = (0..10_000_000).find(|number| {
            let (offset, byte) = work(*number);
            let offset = usize::try_from(offset).unwrap();
            let block = offset / BLOCK_BYTES * BLOCK_BYTES;
            match byte {
                Some(byte) => change(offset, byte),
                None => (block..block + BLOCK_BYTES).map(|at| change(at, 0xff)).last().unwrap(),
            }
        });
        assert!(moment.is_some(), "the file never had this content");
        bench(images.config());
    }
}

#[test]
fn a_second_machine_is_refused_with_the_process_of_the_first() {
    if let Some(folder) = std::env::var_os(CHILD) {
        return work_on(Path::new(&folder));
    }
    let images = Images::new();
    let child = child("a_second_machine_is_refused_with_the_process_of_the_first", &images);
    let error = format!("{:#}", try_bench(images.config()).err().unwrap());
    let expected = format!("VARS.fd is in use by process {} (", child.id());
    kill(child);
    assert!(error.contains(&expected), "{error}");
    bench(images.config());
}

#[test]
fn with_smm_only_processors_in_it_program_the_flash() {
    let images = Images::new();
    let bench = bench(Config { smm: true, ..images.config() });
    let at = VARS + 0x100;
    let smm = |bytes: &[u8]| bytes.iter().for_each(|it| bench.write(Kind::SmmMemory, at, &[*it]));
    for commands in [&[PROGRAM, 0x12][..], &[ERASE, ERASE_CONFIRM], &[READ_STATUS], &[0x12]] {
        write(&bench, at, commands);
        assert_eq!(read(&bench, at), 0xff, "{commands:x?} outside of SMM");
        write(&bench, CODE, commands);
        assert_eq!(read(&bench, CODE), 0x90, "{commands:x?} to CODE");
    }
    smm(&[PROGRAM]);
    write(&bench, at, &[0x66]);
    smm(&[0x55]);
    assert_eq!(read(&bench, at), 0x55, "a write from outside is not part of the command");
    smm(&[READ_STATUS]);
    assert_eq!(read(&bench, at), STATUS_READY);
    smm(&[0xff]);
    drop(bench);
    assert_eq!(fs::read(images.vars()).unwrap()[0x100], 0x55);
}

#[test]
fn a_write_waits_for_the_gate_and_fails_if_it_is_shut() {
    for opens in [true, false] {
        let images = Images::new();
        let mut bench = Bench::new(4096);
        let gate = Arc::new(Gate::new(true, false));
        gate.started(|| ());
        bench.board.shared.disks = Arc::new(Disks::behind(gate.clone()));
        bench.board.add("flash", |grants| images.config().build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&bench, VARS + 0x100, &[PROGRAM, 0x55]));
            thread::sleep(Duration::from_millis(50));
            assert!(!writing.is_finished());
            assert_eq!(fs::read(images.vars()).unwrap()[0x100], 0xff);
            if opens { gate.checked() } else { gate.shut() }
        });
        let written = if opens { 0x55 } else { 0xff };
        assert_eq!(fs::read(images.vars()).unwrap()[0x100], written);
        write(&bench, VARS + 0x100, &[READ_STATUS]);
        let status = read(&bench, VARS + 0x100);
        assert_eq!(status & STATUS_PROGRAM_ERROR == 0, opens, "{status:#x}");
    }
}
