//! Encrypts snapshots with AES-256-GCM. Each snapshot has a key of its own, derived from the
//! user's key file and from a salt, so that the place of a piece is enough of a nonce. The client
//! of a machine derives it: a machine, which its guest may take over, needs no user's key to be
//! saved. To be restored it reads the key file, before its guest runs.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::{hkdf, pbkdf2};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

const KEY_BYTES: usize = 32;
/// A shorter passphrase is guessed too soon.
const SHORTEST: usize = 12;
const LONGEST: usize = 4096;
/// OWASP's number for PBKDF2 with SHA-256. A snapshot cannot ask for more.
const ROUNDS: NonZeroU32 = NonZeroU32::new(600_000).expect("it is not 0");
const PURPOSE: &[u8] = b"transom snapshot";

/// The contents of a key file: a key of 32 bytes, or a passphrase.
pub struct Secret {
    path: PathBuf,
    bytes: Zeroizing<Vec<u8>>,
}

/// The key of one snapshot.
#[derive(Debug)]
pub struct SnapshotKey {
    /// The user's key file.
    pub path: PathBuf,
    pub file: File,
}

/// Without the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl Secret {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let read = File::open(path).map_err(Into::into).and_then(|file| Self::read(&file));
        let bytes = read.with_context(|| format!("key {}", path.display()))?;
        Ok(Self { path: path.to_owned(), bytes })
    }

    fn read(file: &File) -> anyhow::Result<Zeroizing<Vec<u8>>> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(LONGEST + 1));
        file.take(LONGEST as u64 + 1).read_to_end(&mut bytes)?;
        ensure!(bytes.len() <= LONGEST, "it has more than {LONGEST} bytes: give a shorter one");
        // An editor adds a line's end to a passphrase.
        while !is_key(&bytes) && bytes.last().is_some_and(|it| b"\r\n".contains(it)) {
            bytes.pop();
        }
        ensure!(
            bytes.len() >= SHORTEST,
            "it has {} bytes: give a key of {KEY_BYTES} random bytes, or a passphrase of at least \
             {SHORTEST} bytes",
            bytes.len()
        );
        Ok(bytes)
    }

    /// The key of a snapshot. A passphrase is stretched, because people choose it.
    fn derive(&self, salt: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        if is_key(&self.bytes) {
            let all = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&self.bytes);
            let filled = all.expand(&[PURPOSE], hkdf::HKDF_SHA256);
            filled.and_then(|it| it.fill(&mut *key)).expect("one block of HKDF");
        } else {
            pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ROUNDS, salt, &self.bytes, &mut *key);
        }
        key
    }

    /// The salt and the key of a new snapshot, for the machine's process. With a passphrase, this
    /// takes a while.
    pub fn for_snapshot(&self) -> anyhow::Result<SnapshotKey> {
        let mut salt = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut salt).ok().context("the host has no random numbers")?;
        // Hosts may refuse files that could be programs, and old kernels do not know the flag.
        let made = match memfd_create("key", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("key", MemfdFlags::CLOEXEC),
            made => made,
        };
        let file = File::from(made.context("a file for the key")?);
        file.write_all_at(&salt, 0)?;
        file.write_all_at(&*self.derive(&salt), KEY_BYTES as u64)?;
        Ok(SnapshotKey { path: self.path.clone(), file })
    }
}

/// Random bytes are no text.
fn is_key(bytes: &[u8]) -> bool {
    bytes.len() == KEY_BYTES && std::str::from_utf8(bytes).is_err()
}

/// Distinguishes the keys of snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Salt(#[serde(with = "host::hex")] Vec<u8>);

/// The authentication tag of an encrypted piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthTag(#[serde(with = "host::hex")] Vec<u8>);

/// Encrypts and decrypts the pieces of one snapshot.
pub struct Cipher {
    /// Its tables are large.
    key: Box<LessSafeKey>,
    salt: Salt,
}

impl Cipher {
    /// The cipher of a new snapshot, from the file of [`Secret::for_snapshot`].
    pub fn from_file(file: &File) -> anyhow::Result<Self> {
        // A pipe could let the machine wait.
        let length = 2 * KEY_BYTES as u64;
        let found = file.metadata()?;
        ensure!(found.is_file() && found.len() == length, "not a file with {length} bytes");
        let (mut salt, mut key) = (vec![0; KEY_BYTES], Zeroizing::new([0; KEY_BYTES]));
        file.read_exact_at(&mut salt, 0)?;
        file.read_exact_at(&mut *key, KEY_BYTES as u64)?;
        Ok(Self::new(&key, Salt(salt)))
    }

    /// The cipher of the snapshot with this salt.
    pub fn of(secret: &Secret, salt: &Salt) -> Self {
        Self::new(&secret.derive(&salt.0), salt.clone())
    }

    fn new(key: &[u8; KEY_BYTES], salt: Salt) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, key).expect("a key of 256 bits");
        Self { key: Box::new(LessSafeKey::new(key)), salt }
    }

    pub fn salt(&self) -> &Salt {
        &self.salt
    }

    /// Encrypts a piece, whose nonce no other piece of the snapshot has.
    pub fn encrypt(&self, nonce: u64, piece: &mut [u8]) -> anyhow::Result<AuthTag> {
        let tag = self.key.seal_in_place_separate_tag(wide(nonce), Aad::empty(), piece);
        Ok(AuthTag(tag.ok().context("it cannot be encrypted")?.as_ref().to_vec()))
    }

    /// Decrypts a piece. Returns whether key and piece are those with which it was written.
    #[must_use]
    pub fn decrypt(&self, nonce: u64, piece: &mut [u8], tag: &AuthTag) -> bool {
        let Ok(tag) = Tag::try_from(&tag.0[..]) else { return false };
        let opened =
            self.key.open_in_place_separate_tag(wide(nonce), Aad::empty(), tag, piece, 0..);
        opened.is_ok()
    }
}

fn wide(nonce: u64) -> Nonce {
    let mut wide = [0; NONCE_LEN];
    wide[..8].copy_from_slice(&nonce.to_le_bytes());
    Nonce::assume_unique_for_key(wide)
}

#[cfg(test)]
pub(super) mod test {
    use std::io::Write as _;

    use super::*;

    fn secret(bytes: &[u8]) -> anyhow::Result<Secret> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(bytes)?;
        Secret::open(file.path())
    }

    pub(in super::super) fn cipher(byte: u8) -> Cipher {
        Cipher::from_file(&secret(&[byte; 32]).unwrap().for_snapshot().unwrap().file).unwrap()
    }

    #[test]
    fn keys_and_passphrases_of_a_sensible_length_are_taken() {
        let text = [b'x'; 32];
        for (bytes, kept) in [
            (&[0xff; 32][..], &[0xff; 32][..]),
            (b"a long passphrase\r\n", b"a long passphrase"),
            // Those that an editor makes as long as a key, or a byte longer.
            (&[&text[..31], b"\n"].concat(), &text[..31]),
            (&[&text[..], b"\n"].concat(), &text),
        ] {
            let secret = secret(bytes).unwrap();
            assert_eq!(*secret.bytes, kept);
            assert_eq!(is_key(&secret.bytes), bytes[0] == 0xff);
        }
        for (bytes, reason) in
            [(vec![], "0 bytes"), (b"secret\n".to_vec(), "6 bytes"), (vec![1; 4097], "4096 bytes")]
        {
            let error = format!("{:#}", secret(&bytes).unwrap_err());
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn only_the_same_key_salt_nonce_and_piece_are_decrypted() {
        for bytes in [&[0xff; 32][..], b"correct horse battery"] {
            let secret = secret(bytes).unwrap();
            let [cipher, other] =
                [0; 2].map(|_| Cipher::from_file(&secret.for_snapshot().unwrap().file).unwrap());
            let mut piece = *b"contents of memory";
            let tag = cipher.encrypt(5, &mut piece).unwrap();
            assert_ne!(&piece, b"contents of memory");
            let again = Cipher::of(&secret, cipher.salt());
            let opens = |cipher: &Cipher, nonce, piece: &[u8], tag: &AuthTag| {
                let mut piece = piece.to_vec();
                cipher.decrypt(nonce, &mut piece, tag) && piece == b"contents of memory"
            };
            assert!(opens(&again, 5, &piece, &tag));
            assert!(!opens(&again, 6, &piece, &tag));
            assert!(!opens(&other, 5, &piece, &tag));
            assert!(!opens(&again, 5, &piece[1..], &tag));
            for cut in [0, 15] {
                assert!(!opens(&again, 5, &piece, &AuthTag(tag.0[..cut].to_vec())));
            }
            piece[3] ^= 1;
            assert!(!opens(&again, 5, &piece, &tag));
        }
        let short = tempfile::tempfile().unwrap();
        short.set_len(63).unwrap();
        assert!(Cipher::from_file(&short).is_err());
    }
}
