//! The fuzz target of the shared folder, with fixed inputs, and a client that follows the rules.

mod hostile_share;

use std::fs;
use std::time::Duration;

use hostile_share::{Client, create, run, server, status, utf16};

const FULL: u32 = 0x1f_01ff;
const OPEN: (u32, u32) = (1, 0);
const CREATE: (u32, u32) = (2, 0);

/// Pseudo-random bytes for a seed (splitmix64).
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let byte = std::iter::from_fn(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [choice, byte, ..] = (mixed ^ mixed >> 31).to_le_bytes();
        Some(if choice < 80 { byte % 16 } else { byte })
    });
    byte.take(length).collect()
}

#[test]
fn the_server_survives_any_requests() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 0..400 {
        run(folder.path(), noise(seed, 2000).into_iter());
    }
}

impl Client {
    /// CREATE: the status, and the file's id.
    fn create(&mut self, name: &str, access: u32, how: (u32, u32)) -> (u32, u64) {
        let answer = self.send(5, &create(name, access, how));
        let id = answer.get(128..136);
        let id = id.map_or(0, |it| u64::from_le_bytes(it.try_into().unwrap()));
        (status(&answer), id)
    }

    fn close(&mut self, file: u64) -> u32 {
        let id = [file.to_le_bytes(), file.to_le_bytes()].concat();
        status(&self.send(6, &[&[24, 0, 0, 0, 0, 0, 0, 0][..], &id].concat()))
    }
}

fn write(client: &mut Client, file: u64, data: &[u8]) -> u32 {
    let mut body = vec![49, 0, 112, 0];
    body.extend(u32::try_from(data.len()).unwrap().to_le_bytes());
    body.extend([0; 8]);
    body.extend([file.to_le_bytes(), file.to_le_bytes()].concat());
    body.extend([0; 16]);
    body.extend(data);
    status(&client.send(9, &body))
}

fn read(client: &mut Client, file: u64) -> Vec<u8> {
    let mut body = vec![49, 0, 0, 0, 0, 0, 1, 0];
    body.extend([0; 8]);
    body.extend([file.to_le_bytes(), file.to_le_bytes()].concat());
    body.extend([0; 17]);
    client.send(8, &body).split_off(80)
}

fn set_info(client: &mut Client, file: u64, class: u8, data: &[u8]) -> u32 {
    let mut body = vec![33, 0, 1, class];
    body.extend(u32::try_from(data.len()).unwrap().to_le_bytes());
    body.extend([96, 0, 0, 0, 0, 0, 0, 0]);
    body.extend([file.to_le_bytes(), file.to_le_bytes()].concat());
    body.extend(data);
    status(&client.send(17, &body))
}

fn rename(client: &mut Client, file: u64, to: &str) -> u32 {
    let to = utf16(to);
    let mut data = vec![0; 16];
    data.extend(u32::try_from(to.len()).unwrap().to_le_bytes());
    data.extend(&to);
    set_info(client, file, 10, &data)
}

#[test]
fn message_ids_are_used_once_and_only_if_granted() {
    const ECHO: u16 = 13;
    const CANCEL: u16 = 12;
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    // More than 8192 credits are not granted, however often a client asks.
    let login = || {
        let mut client = Client::login(&server);
        for _ in 0..600 {
            assert_eq!(status(&client.send(ECHO, &[4, 0, 0, 0])), 0);
        }
        client
    };
    let ends = |client: &mut Client, id: u64, charge: u16, command: u16| {
        let mut request = client.request_as(id, charge, command, &[4, 0, 0, 0]);
        client.connection.receive(&mut request).is_err()
    };
    let next = login().next;
    for (id, charge) in [
        (next - 1, 1),
        (0, 1),
        (next + 8192, 1),
        (next + 8191, 2),
        (next, 8193),
        (next, u16::MAX),
        (u64::MAX, 1),
    ] {
        assert!(ends(&mut login(), id, charge, ECHO), "{id} {charge}");
    }
    let mut client = login();
    for (id, charge) in [(next + 8191, 1), (next, 1), (next + 1, 8190)] {
        assert!(!ends(&mut client, id, charge, ECHO), "{id} {charge}");
    }
    assert!(ends(&mut client, next + 1, 1, ECHO), "an id again");
    // A CANCEL has the id of the request that it is about, and needs no credit.
    let mut client = login();
    for id in 0..10_000 {
        assert!(!ends(&mut client, id, 1, CANCEL), "{id}");
    }
    assert_eq!(status(&client.send(ECHO, &[4, 0, 0, 0])), 0);
}

#[test]
fn files_are_written_read_renamed_and_deleted() {
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    let (made, file) = client.create("Grüße.txt", FULL, CREATE);
    assert_eq!((made, write(&mut client, file, b"hello")), (0, 0));
    assert_eq!(read(&mut client, file), b"hello");
    assert_eq!(client.create("GRÜSSE.TXT", FULL, OPEN).0, 0xc000_0034, "not the same letters");
    assert_eq!(client.create("GRÜßE.TXT", FULL, CREATE).0, 0xc000_0035, "exists");
    assert_eq!(rename(&mut client, file, "grüße.TXT"), 0);
    assert_eq!(fs::read(root.path().join("grüße.TXT")).unwrap(), b"hello");
    assert_eq!(set_info(&mut client, file, 13, &[1]), 0);
    assert_eq!(client.create("grüße.txt", FULL, OPEN).0, 0xc000_0056, "to be deleted");
    assert_eq!(client.close(file), 0);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn directories_are_made_listed_and_removed() {
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    let (_, directory) = client.create("dir", FULL, (2, 1));
    let (_, inside) = client.create(r"DIR\Inside", FULL, CREATE);
    assert_eq!(rename(&mut client, directory, "other"), 0xc000_0022, "a file in it is open");
    assert_eq!(set_info(&mut client, directory, 13, &[1]), 0xc000_0101, "not empty");
    let mut body = vec![33, 0, 37, 0, 0, 0, 0, 0];
    body.extend([directory.to_le_bytes(), directory.to_le_bytes()].concat());
    body.extend([96, 0, 2, 0, 0, 0, 1, 0]);
    body.extend(utf16("*"));
    let answer = client.send(14, &body);
    let inside_name = utf16("Inside");
    assert!(answer.windows(inside_name.len()).any(|it| it == inside_name));
    assert_eq!(status(&client.send(14, &body)), 0x8000_0006, "no more");
    client.close(inside);
    let (_, inside) = client.create(r"dir\inside", FULL, (1, 0x1000));
    client.close(inside);
    assert_eq!(set_info(&mut client, directory, 13, &[1]), 0);
    client.close(directory);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_read_only_share_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("a"), "x").unwrap();
    let server = server(root.path(), true);
    let mut client = Client::login(&server);
    let refused = 0xc000_0022;
    assert_eq!(client.create("a", FULL, OPEN).0, refused);
    assert_eq!(client.create("b", 0x12_0089, CREATE).0, refused);
    assert_eq!(client.create("a", 0x12_0089, (5, 0)).0, refused);
    let (opened, file) = client.create("a", 0x200_0000, OPEN);
    assert_eq!((opened, write(&mut client, file, b"y")), (0, refused));
    assert_eq!(rename(&mut client, file, "b"), refused);
    assert_eq!(fs::read(root.path().join("a")).unwrap(), b"x");
}

#[test]
fn only_signed_requests_of_the_account_are_served() {
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    let body = create("a", FULL, CREATE);
    let mut forged = client.request(5, &body);
    forged[70] ^= 1;
    assert_eq!(status(&client.connection.receive(&mut forged).unwrap()), 0xc000_0022);
    let mut unsigned = client.request(5, &body);
    unsigned[16] &= !8;
    assert_eq!(status(&client.connection.receive(&mut unsigned).unwrap()), 0xc000_0022);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    let mut stranger = Client::new(&server);
    stranger.negotiate();
    assert_eq!(stranger.authenticate("User", &[1; 16]), 0xc000_006d);
    stranger.tree = client.tree;
    assert_eq!(status(&stranger.send(5, &body)), 0xc000_0203, "no session");
}

#[test]
fn a_watched_directory_answers_when_it_changes() {
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    let (_, directory) = client.create("", 0x12_0089, (1, 1));
    let mut body = vec![32, 0, 0, 0, 0, 0, 1, 0];
    body.extend([directory.to_le_bytes(), directory.to_le_bytes()].concat());
    body.extend([3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(status(&client.send(15, &body)), 0x103, "pending");
    assert!(client.connection.take_ready().is_empty());
    fs::write(root.path().join("new"), "").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let ready = client.connection.take_ready();
    let name = utf16("new");
    assert!(ready[0].windows(name.len()).any(|it| it == name));
    assert_eq!(status(&client.send(15, &body)), 0x103);
    client.close(directory);
    assert_eq!(status(&client.connection.take_ready()[0]), 0x10b, "the directory was closed");
}

#[test]
fn a_locked_range_is_refused_to_others() {
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let (mut one, mut two) = (Client::login(&server), Client::login(&server));
    let (_, a) = one.create("a", FULL, CREATE);
    let (_, b) = two.create("a", FULL, OPEN);
    let lock = |client: &mut Client, file: u64, flags: u8| {
        let mut body = vec![48, 0, 1, 0, 0, 0, 0, 0];
        body.extend([file.to_le_bytes(), file.to_le_bytes()].concat());
        body.extend([0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, flags, 0, 0, 0, 0, 0, 0, 0]);
        status(&client.send(10, &body))
    };
    assert_eq!(lock(&mut one, a, 0x12), 0);
    assert_eq!(lock(&mut two, b, 0x12), 0xc000_0055);
    assert_eq!(write(&mut two, b, b"x"), 0xc000_0054);
    drop(one);
    assert_eq!(write(&mut two, b, b"x"), 0);
}

#[test]
fn a_shared_folder_stays_open_for_all() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("full")).unwrap();
    fs::write(root.path().join("full/file"), "").unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    for name in ["", "full"] {
        let (_, held) = client.create(name, 0x12_0089, (1, 1));
        // To be deleted when it is closed, which it cannot be.
        let (_, deleted) = client.create(name, 0x1_0000, (1, 0x1001));
        client.close(deleted);
        let (again, file) = client.create(name, 0x12_0089, (1, 1));
        assert_eq!(again, 0, "{name:?}");
        client.close(file);
        client.close(held);
    }
}

#[test]
fn space_that_the_volume_does_not_have_is_not_reserved() {
    use std::os::unix::fs::MetadataExt as _;
    let root = tempfile::tempdir().unwrap();
    let server = server(root.path(), false);
    let mut client = Client::login(&server);
    let (_, file) = client.create("a", FULL, CREATE);
    assert_eq!(set_info(&mut client, file, 19, &(1_u64 << 44).to_le_bytes()), 0xc000_007f);
    assert_eq!(fs::metadata(root.path().join("a")).unwrap().blocks(), 0);
    assert_eq!(set_info(&mut client, file, 19, &(1_u64 << 20).to_le_bytes()), 0);
}
