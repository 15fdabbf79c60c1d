//! A client that logs in and then sends anything, with valid signatures.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use ring::hmac;
use rustix::fs::Mode;
use share::{Account, Config, Connection, Folder, Server, Share};

/// The content, which no answer may contain, of a file beside the folder.
const SECRET: &[u8] = b"a secret beside the folder";
/// The NT hash of `Password` ([MS-NLMP] 4.2.2.1.2).
const HASH: [u8; 16] = [
    0xa4, 0xf4, 0x9c, 0x40, 0x65, 0x10, 0xbd, 0xca, 0xb6, 0x82, 0x4e, 0xe7, 0xc3, 0x0f, 0xd8, 0x52,
];
const HEADER: usize = 64;
/// The largest answer: 1 MiB of data after 256 KiB of other answers, and heads.
const MAX_ANSWER: usize = (1 << 20) + (320 << 10);

pub(crate) fn server(root: &Path, read_only: bool) -> Arc<Server> {
    let open: OwnedFd = fs::File::open(root).unwrap().into();
    Server::new(Config {
        host: "TRANSOM".to_owned(),
        account: Account::new("User", "Password"),
        shares: vec![Share { name: "Data".to_owned(), folder: Folder::new(open), read_only }],
    })
}

fn hmac_md5(key: &[u8; 16], parts: &[&[u8]]) -> [u8; 16] {
    let mut pad = [0; 64];
    pad[..16].copy_from_slice(key);
    let inner = md5::compute([&pad.map(|it| it ^ 0x36)[..], &parts.concat()].concat());
    md5::compute([&pad.map(|it| it ^ 0x5c)[..], &inner.0].concat()).0
}

pub(crate) fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

pub(crate) struct Client {
    pub(crate) connection: Connection,
    key: hmac::Key,
    session: u64,
    pub(crate) tree: u32,
    /// The next message id.
    pub(crate) next: u64,
}

impl Client {
    pub(crate) fn new(server: &Arc<Server>) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &[0; 16]);
        let connection = Connection::new(server, None);
        Self { connection, key, session: 0, tree: 0, next: 0 }
    }

    /// Negotiates SMB 2.1, logs in and connects to the share.
    pub(crate) fn login(server: &Arc<Server>) -> Self {
        let mut client = Self::new(server);
        client.negotiate();
        client.authenticate("User", &HASH);
        let path = utf16(r"\\host.lan\Data");
        let head = [9, 0, 0, 0, 72, 0, u8::try_from(path.len()).unwrap(), 0];
        let answer = client.send(3, &[&head[..], &path].concat());
        assert_eq!(status(&answer), 0);
        client.tree = u32::from_le_bytes(answer[36..40].try_into().unwrap());
        client
    }

    pub(crate) fn negotiate(&mut self) {
        let body = [&[36, 0, 1, 0, 1, 0][..], &[0; 30], &[0x10, 2]].concat();
        let answer = self.send(0, &body);
        assert_eq!((status(&answer), &answer[68..70]), (0, &[0x10, 2][..]));
    }

    /// Returns the status of the login.
    pub(crate) fn authenticate(&mut self, user: &str, hash: &[u8; 16]) -> u32 {
        let flags = [0x15, 0x82, 0x88, 0x20];
        let negotiate = [&b"NTLMSSP\0\x01\0\0\0"[..], &flags, &[0; 16]].concat();
        let answer = self.setup(&negotiate);
        assert_eq!(status(&answer), 0xc000_0016);
        self.session = u64::from_le_bytes(answer[40..48].try_into().unwrap());
        let nonce = &answer[72..][24..32];
        let (user, upper) = (utf16(user), utf16(&user.to_uppercase()));
        let key = hmac_md5(hash, &[&upper]);
        let blob = [&[1, 1][..], &[0; 14], &[0xaa; 8], &[0; 4], &[0; 4]].concat();
        let proof = hmac_md5(&key, &[nonce, &blob]);
        let response = [&proof[..], &blob].concat();
        let mut message = b"NTLMSSP\0\x03\0\0\0".to_vec();
        let mut payload = Vec::new();
        for part in [&[0_u8; 0][..], &response, &[], &user, &[], &[]] {
            let length = u16::try_from(part.len()).unwrap().to_le_bytes();
            let at = u32::try_from(88 + payload.len()).unwrap().to_le_bytes();
            message.extend([&length[..], &length, &at].concat());
            payload.extend(part);
        }
        message.extend([&flags[..], &[0; 24], &payload].concat());
        let key = hmac::Key::new(hmac::HMAC_SHA256, &hmac_md5(&key, &[&proof]));
        let answer = self.setup(&message);
        self.key = key;
        status(&answer)
    }

    fn setup(&mut self, token: &[u8]) -> Vec<u8> {
        let length = u8::try_from(token.len()).unwrap();
        let head = [25, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 88, 0, length, 0];
        self.send(1, &[&head[..], &[0; 8], token].concat())
    }

    /// A request, signed after the login.
    pub(crate) fn request(&mut self, command: u16, body: &[u8]) -> Vec<u8> {
        let (id, charge) = (self.next, if self.next == 0 { 1 } else { 16 });
        self.next += u64::from(charge);
        self.request_as(id, charge, command, body)
    }

    /// As [`Client::request`], with a message id and the number of ids that it needs.
    pub(crate) fn request_as(&self, id: u64, charge: u16, command: u16, body: &[u8]) -> Vec<u8> {
        let signs = if self.tree == 0 && command < 3 { 0 } else { 8 };
        let mut request = b"\xfeSMB\x40\0".to_vec();
        request.extend(charge.to_le_bytes());
        request.extend([0; 4]);
        request.extend(command.to_le_bytes());
        request.extend([0x20, 0, signs, 0, 0, 0, 0, 0, 0, 0]);
        request.extend(id.to_le_bytes());
        request.extend([0; 4]);
        request.extend(self.tree.to_le_bytes());
        request.extend(self.session.to_le_bytes());
        request.extend([0; 16]);
        request.extend(body);
        if signs == 8 {
            let tag = hmac::sign(&self.key, &request);
            request[48..64].copy_from_slice(&tag.as_ref()[..16]);
        }
        request
    }

    /// Sends a request and returns its answer, which is empty if there is none.
    pub(crate) fn send(&mut self, command: u16, body: &[u8]) -> Vec<u8> {
        let mut request = self.request(command, body);
        self.connection.receive(&mut request).unwrap_or_default()
    }
}

/// The body of CREATE. `how` are disposition and options.
pub(crate) fn create(name: &str, access: u32, (disposition, options): (u32, u32)) -> Vec<u8> {
    let name = utf16(name);
    let mut body = vec![57, 0, 0, 0, 2, 0, 0, 0];
    body.extend([0; 16]);
    for value in [access, 0, 7, disposition, options] {
        body.extend(value.to_le_bytes());
    }
    body.extend([120, 0]);
    body.extend(u16::try_from(name.len()).unwrap().to_le_bytes());
    body.extend([0; 8]);
    body.extend(&name);
    // The body states 57 bytes, of which 56 are before the name.
    body.push(0);
    body
}

pub(crate) fn status(answer: &[u8]) -> u32 {
    answer.get(8..12).map_or(u32::MAX, |it| u32::from_le_bytes(it.try_into().unwrap()))
}

const NAMES: [&str; 16] = [
    "",
    "a",
    "A",
    "dir",
    r"dir\b",
    r"DIR\B",
    r"dir\..\..\secret",
    "..",
    r"out\secret",
    "OUT",
    "link",
    "fifo",
    "a:b",
    "\u{f022}",
    r"dir\out\secret",
    "ends.",
];

/// Sizes of the bodies of commands from LOGOFF on.
const SIZES: [u8; 17] = [4, 9, 4, 57, 24, 24, 49, 49, 48, 57, 4, 4, 33, 32, 41, 33, 24];
/// Where bodies have the id of a file, or 0.
const FILES: [usize; 17] = [0, 0, 0, 0, 8, 8, 16, 16, 8, 8, 0, 0, 8, 8, 24, 16, 8];

/// The place of ECHO in these lists.
const ECHO: usize = 11;

/// Sends requests made of any bytes.
pub(crate) fn run(folder: &Path, mut input: impl Iterator<Item = u8>) {
    let top = tempfile::tempdir_in(folder).unwrap();
    let (root, outside) = (top.path().join("root"), top.path().join("outside"));
    fs::create_dir_all(root.join("dir")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), SECRET).unwrap();
    fs::write(root.join("a"), "content").unwrap();
    symlink(&outside, root.join("out")).unwrap();
    symlink(&outside, root.join("dir/out")).unwrap();
    symlink(outside.join("secret"), root.join("link")).unwrap();
    let mode = Mode::from_raw_mode(0o666);
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), mode).unwrap();

    let server = server(&root, input.next().is_some_and(|it| it == 0));
    let mut client = Client::login(&server);
    let mut files = vec![u64::MAX];
    let mut step = || step(&mut client, &mut files, &mut input);
    while step().is_some() {}
    drop(client);
    // All files are closed, and nothing beside the folder has changed.
    assert_eq!(fs::read(outside.join("secret")).unwrap(), SECRET);
    let names = |it: &Path| fs::read_dir(it).unwrap().count();
    assert_eq!((names(&outside), names(top.path())), (1, 2));
}

fn step(
    client: &mut Client,
    files: &mut Vec<u64>,
    input: &mut impl Iterator<Item = u8>,
) -> Option<()> {
    let (kind, choice) = (input.next()?, usize::from(input.next()?));
    let mut request = match kind {
        0..96 => {
            let access = [0x1f_01ff, 0x200_0000, 0x12_0089, 0x1_0080][choice % 4];
            let how = (input.next()? % 7, input.next()?);
            let options = [0, 1, 0x40, 0x1000, 0x1041][usize::from(how.1) % 5];
            let body = create(NAMES[choice % NAMES.len()], access, (how.0.into(), options));
            client.request(5, &body)
        }
        96..250 => {
            // LOGOFF and TREE_DISCONNECT end everything, so that they are rare.
            let place = match usize::from(kind) % SIZES.len() {
                0 | 2 if choice > 3 => ECHO,
                place => place,
            };
            let mut body = body(place, choice, input)?;
            if FILES[place] > 0 {
                let id = files[choice % files.len()].to_le_bytes();
                body[FILES[place]..][..16].copy_from_slice(&[id, id].concat());
            }
            client.request(u16::try_from(place + 2).unwrap(), &body)
        }
        // A header that is not signed, or no header.
        _ => {
            let mut request = client.request(u16::from(kind), &[0; 64]);
            for _ in 0..4 {
                request[usize::from(input.next()?) % 128] = input.next()?;
            }
            request
        }
    };
    let Ok(answer) = client.connection.receive(&mut request) else { return None };
    check(&answer);
    for late in client.connection.take_ready() {
        check(&late);
    }
    if answer.get(12) == Some(&5) && status(&answer) == 0 {
        files.push(u64::from_le_bytes(answer[128..136].try_into().unwrap()));
    }
    Some(())
}

/// A body of the right size, with small numbers more often than large ones.
fn body(place: usize, choice: usize, input: &mut impl Iterator<Item = u8>) -> Option<Vec<u8>> {
    let size = SIZES[place];
    let mut body = vec![0; 256];
    (body[0], body[1]) = (size, 0);
    for _ in 0..choice % 24 {
        let at = 2 + usize::from(input.next()?) % 94;
        body[at] = input.next()?;
    }
    // Sizes and offsets of files stay small, so that no disk is filled.
    if place == 15 {
        (body[2], body[8], body[9]) = (1 + body[2] % 3, 96, 0);
        body[35..40].fill(0);
    }
    if place == 7 {
        body[11..16].fill(0);
    }
    Some(body)
}

fn check(answer: &[u8]) {
    assert!(answer.len() <= MAX_ANSWER, "{} bytes", answer.len());
    assert!(answer.is_empty() || answer.len() > HEADER && answer.starts_with(b"\xfeSMB"));
    assert!(!answer.windows(SECRET.len()).any(|it| it == SECRET), "a file beside the folder");
}
