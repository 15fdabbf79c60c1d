//! One file from a web server to the volume: in parallel ranges where the server has them, resumed
//! after a kill, verified, and renamed only when it is whole and on the disk.
//!
//! Until then its name is `NAME.part`, and `NAME.part.json` has what is there. The server is asked
//! for the first bytes, so that a page of a proxy is not taken for a file.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use hyper::StatusCode;
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, LAST_MODIFIED, RANGE, REFERER,
};
use tokio::time::sleep;

use super::catalog;
use super::client::{Answer, Client};
use super::digest::{self, Checksum};
use super::fault::Fault;
use super::meter::Meter;
use super::pieces::Pieces;
use super::sidecar::{Identity, Sidecar};
use super::size::size;
use crate::esd::archive::Archive;
use crate::media::wim::header::MAGIC;
use crate::settings::host;
use crate::settings::value::MIB;
use crate::story::Story;
use crate::{files, medium};

/// The start of a file, with the first descriptor of a CD.
const START: u64 = 64 << 10;
/// Media and driver CDs are larger, and no larger than this.
const LENGTHS: Range<u64> = 64 << 10..1 << 40;
/// Interval at which what has arrived is written to the disk.
const SAVED: Duration = Duration::from_secs(5);
/// Ends of the names of an unfinished file, and of the note about it.
const PART: &str = ".part";
const NOTE: &str = ".part.json";
/// Space that stays free for files of the machine.
const MARGIN: u64 = 16 * MIB;

/// A file to download.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The name for people, as in `Windows 11`.
    pub name: String,
    pub url: String,
    pub referer: Option<String>,
    pub path: PathBuf,
    /// Known from a catalog, or given with the address.
    pub length: Option<u64>,
    pub checksum: Option<Checksum>,
    pub connections: usize,
    pub form: Form,
}

/// The form of a file, which its start and its end must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Cd,
    /// An upgrade image (ESD).
    Upgrade,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Self::Cd => "an ISO image",
            Self::Upgrade => "an upgrade image",
        }
    }

    /// Why a file that begins like this has another form.
    fn mistake(self, start: &[u8], page: bool) -> Option<&'static str> {
        let begins = match self {
            Self::Cd => medium::begins_as_cd(start),
            Self::Upgrade => start.starts_with(MAGIC),
        };
        if page_like(start) {
            return Some(
                "it is a web page, such as a login or an error of the server, a proxy or the \
                 network",
            );
        }
        let other = medium::mistaken(start).filter(|_| !(begins && self == Self::Upgrade));
        other.map(|(what, _)| what).or(match (page || !begins, self) {
            (false, _) => None,
            (_, Self::Cd) => Some("it has no file system of a CD"),
            (_, Self::Upgrade) => Some("it does not begin as one"),
        })
    }

    /// Checks a whole file.
    fn check(self, path: &Path) -> anyhow::Result<()> {
        match self {
            Self::Cd => medium::check(path),
            Self::Upgrade => Archive::open(path).map(drop),
        }
    }
}

/// The answer to the first request.
struct Offer {
    identity: Identity,
    has_ranges: bool,
    checksum: Option<Checksum>,
}

/// Downloads a file, unless it is there. A file of that name is always whole.
pub async fn fetch(client: &Client, wanted: &Wanted, story: &Story) -> Result<(), Fault> {
    if wanted.path.exists() {
        return Ok(());
    }
    let offer = again(client, || offer(client, wanted)).await?;
    let download = Download::open(client, wanted, &offer, story)?;
    let fetched = match offer.has_ranges {
        true => download.ranges().await,
        false => again(client, || download.whole()).await,
    };
    fetched?;
    download.finish()
}

/// Asks the server whether it has the file, unless it is there.
pub(super) async fn check(client: &Client, wanted: &Wanted) -> Result<(), Fault> {
    if wanted.path.exists() {
        return Ok(());
    }
    again(client, || offer(client, wanted)).await.map(drop)
}

/// Removes unfinished downloads from a folder, except of these files. Files of others stay: a
/// download of ours has a note, and no other pod has it open.
pub fn forget_others(folder: &Path, wanted: &[PathBuf]) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let whole = names.filter_map(|name| Some(folder.join(name.strip_suffix(NOTE)?)));
    let stale = whole.filter(|path| !wanted.contains(path) && is_ours(path));
    stale.inspect(|path| forget(path)).map(|path| part(&path)).collect()
}

/// Whether a download was begun by a pod, and none goes on with it.
fn is_ours(path: &Path) -> bool {
    if Sidecar::read(&note(path)).is_none() {
        return false;
    }
    let opened = files::open_itself(&part(path), File::options().read(true));
    opened.and_then(|file| files::try_lock(&file)).is_ok_and(|locked| locked)
}

/// Removes what an unfinished download has left.
pub fn forget(path: &Path) {
    for path in [part(path), note(path)] {
        fs::remove_file(path).ok();
    }
}

pub(super) fn part(path: &Path) -> PathBuf {
    with(path, PART)
}

pub(super) fn note(path: &Path) -> PathBuf {
    with(path, NOTE)
}

fn with(path: &Path, end: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(end);
    path.with_file_name(name)
}

/// Tries until it succeeds, or the client's patience is over.
pub(super) async fn again<T, F: Future<Output = Result<T, Fault>>>(
    client: &Client,
    attempt: impl Fn() -> F,
) -> Result<T, Fault> {
    let mut failures = 0;
    loop {
        let fault = match attempt().await {
            Err(fault @ Fault::Passing(_)) => fault,
            done => return done,
        };
        failures += 1;
        if failures >= client.patience.failures {
            return Err(fault);
        }
        tracing::warn!("{fault}: trying again");
        sleep(client.patience.pause(failures)).await;
    }
}

async fn request(
    client: &Client,
    wanted: &Wanted,
    range: Option<&Range<u64>>,
) -> Result<Answer, Fault> {
    let mut headers: Vec<(HeaderName, String)> = Vec::new();
    headers.extend(wanted.referer.clone().map(|referer| (REFERER, referer)));
    headers.extend(range.map(|it| (RANGE, format!("bytes={}-{}", it.start, it.end - 1))));
    let answer = client.get(&wanted.url, &headers).await?;
    let host = answer.address.host_header();
    match answer.head.status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(answer),
        status @ (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS) => {
            Err(Fault::passing(format!("{host}: status {status}")))
        }
        status if status.is_server_error() => {
            Err(Fault::passing(format!("{host}: status {status}")))
        }
        status => {
            let out = match status {
                StatusCode::UNAUTHORIZED => "give user and password, as in https://user:password@…",
                StatusCode::FORBIDDEN => "the link may be over: get a new one",
                StatusCode::NOT_FOUND | StatusCode::GONE => "there is no such file: check the link",
                _ => "check the link",
            };
            Err(Fault::last(format!("{}: status {status}: {out}", answer.address.shown())))
        }
    }
}

/// Asks for the start of the file, and reads its identity from the answer.
async fn offer(client: &Client, wanted: &Wanted) -> Result<Offer, Fault> {
    let answer = request(client, wanted, Some(&(0..START))).await?;
    let shown = answer.address.shown();
    let has_ranges = answer.head.status == StatusCode::PARTIAL_CONTENT;
    let length = match has_ranges {
        true => answer.header(&CONTENT_RANGE).and_then(content_range).map(|(_, whole)| whole),
        false => answer.header(&CONTENT_LENGTH).and_then(|text| text.parse().ok()),
    };
    let (tag, modified) = (answer.header(&ETAG), answer.header(&LAST_MODIFIED));
    let mut identity = Identity::new(length.unwrap_or(0), tag, modified);
    let last = answer.address.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
    let known = catalog::named(&last);
    let checksum = wanted.checksum.clone();
    let checksum = checksum.or_else(|| known.and_then(catalog::File::checksum));
    identity.checksum = checksum.as_ref().map(Checksum::to_string);
    let page = answer.header(&CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html"));
    let start = answer.start(usize::try_from(START).unwrap_or(usize::MAX)).await?.0;
    let form = wanted.form;
    let refuse = |why: &str| Err(Fault::last(format!("{shown} is not {}: {why}", form.name())));
    if let Some(why) = form.mistake(&start, page) {
        return refuse(why);
    }
    let Some(length) = length else { return refuse("the server does not tell its size") };
    if !LENGTHS.contains(&length) {
        return refuse(&format!("it has {length} bytes"));
    }
    if last.to_lowercase().contains("a64fre") || last.to_lowercase().contains("arm64") {
        return refuse("it is for ARM processors");
    }
    if let Some(other) =
        wanted.length.or(known.map(|it| it.length)).filter(|known| *known != length)
    {
        let sentence = format!("{shown}: it has {length} bytes, but {} has {other}", wanted.name);
        return Err(Fault::last(format!("{sentence}: the server has another file")));
    }
    Ok(Offer { identity, has_ranges, checksum })
}

fn page_like(start: &[u8]) -> bool {
    start.trim_ascii_start().starts_with(b"<")
}

/// First byte and whole length in `bytes 0-9/100` (RFC 9110 14.4).
pub fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, whole) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.trim().split_once('-')?;
    let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
    let whole: u64 = whole.trim().parse().ok()?;
    (start <= end && end < whole).then_some((start, whole))
}

struct Download<'a> {
    client: &'a Client,
    wanted: &'a Wanted,
    identity: &'a Identity,
    checksum: Option<&'a Checksum>,
    file: File,
    state: RefCell<State<'a>>,
    /// All bytes are there, and nothing is left to save.
    ended: Cell<bool>,
}

/// A download that fails or is stopped goes on from here at the next start.
impl Drop for Download<'_> {
    fn drop(&mut self) {
        if !self.ended.get()
            && let Err(error) = self.save()
        {
            tracing::warn!("the next start downloads {} again: {error}", self.wanted.name);
        }
    }
}

struct State<'a> {
    pieces: Pieces,
    /// Bytes that have arrived, including those of unfinished pieces.
    bytes: u64,
    saved: Instant,
    meter: Meter<'a>,
}

impl<'a> Download<'a> {
    /// Opens the unfinished file, and checks that the rest of it has room.
    fn open(
        client: &'a Client,
        wanted: &'a Wanted,
        offer: &'a Offer,
        story: &'a Story,
    ) -> Result<Self, Fault> {
        let identity = &offer.identity;
        let (path, length) = (part(&wanted.path), identity.length);
        let kept = Sidecar::read(&note(&wanted.path));
        let kept = kept.filter(|kept| offer.has_ranges && kept.identity.fits(identity));
        let mut options = File::options();
        let file =
            files::open_itself(&path, options.read(true).write(true).create(true).truncate(false))?;
        // Without locks, nobody is known to be there.
        if !files::try_lock(&file).unwrap_or(true) {
            let sentence = format!("{}: another pod downloads this file", path.display());
            return Err(Fault::host(sentence));
        }
        let kept = kept.filter(|_| file.metadata().is_ok_and(|it| it.len() == length));
        if kept.is_none() {
            fs::remove_file(note(&wanted.path)).ok();
            file.set_len(0)?;
        }
        check_room(&wanted.path, &file, length)?;
        file.set_len(length)?;
        if kept.is_none() {
            // From here on it is known as a download.
            Sidecar::new(identity, &[]).write(&note(&wanted.path))?;
        }
        let mut pieces = Pieces::new(length);
        let mut bytes = 0;
        for (start, end) in kept.iter().flat_map(|kept| &kept.done) {
            pieces.finish(*start..*end);
            bytes += end - start;
        }
        let mut meter = Meter::begin(story, &wanted.name);
        if bytes > 0 {
            story.info(&format!("{} of {} are there already", size(bytes), size(length)));
        }
        meter.update(bytes, length);
        let state = State { pieces, bytes, saved: Instant::now(), meter };
        let state = RefCell::new(state);
        let checksum = offer.checksum.as_ref();
        Ok(Self { client, wanted, identity, checksum, file, state, ended: Cell::new(false) })
    }

    /// Fetches the missing pieces over several connections.
    async fn ranges(&self) -> Result<(), Fault> {
        let connections = self.wanted.connections.max(1);
        try_join_all((0..connections).map(|_| self.connection(connections))).await?;
        let length = self.identity.length;
        self.state.borrow_mut().meter.update(length, length);
        Ok(())
    }

    async fn connection(&self, connections: usize) -> Result<(), Fault> {
        loop {
            let taken = self.state.borrow_mut().pieces.take(connections);
            let Some(run) = taken else { return Ok(()) };
            if let Err(fault) = self.run(&run).await {
                self.state.borrow_mut().pieces.give_back(&run);
                return Err(fault);
            }
        }
    }

    /// Fetches these bytes, over several connections if one after the other breaks.
    async fn run(&self, run: &Range<u64>) -> Result<(), Fault> {
        let (mut at, mut failures) = (run.start, 0);
        loop {
            let before = at;
            let fault = match self.part(run, &mut at).await {
                Err(fault @ Fault::Passing(_)) => fault,
                done => return done,
            };
            // A server that breaks off now and then is still a way to the end.
            failures = if at - before >= START { 1 } else { failures + 1 };
            if failures >= self.client.patience.failures {
                return Err(fault);
            }
            tracing::warn!("{fault}: trying again");
            sleep(self.client.patience.pause(failures)).await;
        }
    }

    /// Fetches the bytes of a run from `at` on, which follows what has arrived.
    async fn part(&self, run: &Range<u64>, at: &mut u64) -> Result<(), Fault> {
        let mut answer = request(self.client, self.wanted, Some(&(*at..run.end))).await?;
        let host = answer.address.host_header();
        if answer.head.status != StatusCode::PARTIAL_CONTENT {
            return Err(Fault::passing(format!("{host} sent the whole file instead of a part")));
        }
        let told = answer.header(&CONTENT_RANGE).and_then(content_range);
        let (tag, modified) = (answer.header(&ETAG), answer.header(&LAST_MODIFIED));
        let now = Identity::new(told.map_or(0, |(_, whole)| whole), tag, modified);
        let now = Identity { checksum: self.identity.checksum.clone(), ..now };
        let known = self.identity.tag.is_some() || self.identity.modified.is_some();
        if told != Some((*at, self.identity.length)) || known && !now.fits(self.identity) {
            return Err(Fault::passing(format!("{host} sent a part of another file")));
        }
        while *at < run.end {
            let rest = run.end - *at;
            let Some(bytes) = answer.next().await? else {
                return Err(Fault::passing(format!("{host} ended a part {} early", size(rest))));
            };
            let fits = bytes.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
            self.write(&bytes[..fits], *at)?;
            *at += fits as u64;
            self.state.borrow_mut().pieces.finish(run.start..*at);
        }
        Ok(())
    }

    /// Fetches the whole file over one connection.
    async fn whole(&self) -> Result<(), Fault> {
        let mut answer = request(self.client, self.wanted, None).await?;
        let host = answer.address.host_header();
        self.state.borrow_mut().bytes = 0;
        let (mut at, length) = (0, self.identity.length);
        while let Some(bytes) = answer.next().await? {
            if bytes.len() as u64 > length - at {
                return Err(Fault::passing(format!("{host} sent more than the {length} bytes")));
            }
            self.write(&bytes, at)?;
            at += bytes.len() as u64;
        }
        if at < length {
            return Err(Fault::passing(format!(
                "{host} ended the file {} early",
                size(length - at)
            )));
        }
        self.state.borrow_mut().pieces.finish(0..length);
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), Fault> {
        self.file.write_all_at(bytes, at).map_err(|error| no_room(&self.wanted.path, &error))?;
        let mut state = self.state.borrow_mut();
        state.bytes += bytes.len() as u64;
        let bytes = state.bytes.min(self.identity.length);
        state.meter.update(bytes, self.identity.length);
        let due = state.saved.elapsed() >= SAVED;
        drop(state);
        if due {
            self.save()?;
        }
        Ok(())
    }

    /// Writes what has arrived to the disk, and then the note that it is there.
    fn save(&self) -> io::Result<()> {
        let done = self.state.borrow().pieces.done();
        self.file.sync_data()?;
        Sidecar::new(self.identity, &done).write(&note(&self.wanted.path))?;
        self.state.borrow_mut().saved = Instant::now();
        Ok(())
    }

    /// Verifies the file, and gives it its name.
    fn finish(&self) -> Result<(), Fault> {
        let (path, story) = (&self.wanted.path, self.state.borrow().meter.story());
        self.ended.set(true);
        debug_assert!(self.state.borrow().pieces.is_whole(), "all connections have ended");
        if let Some(known) = self.checksum {
            story.step(&format!("Verifying {}…", self.wanted.name));
            let found =
                digest::of(&self.file, known, |at| story.progress(at, self.identity.length))?;
            if found != *known {
                forget(path);
                let sentence = format!(
                    "{}: the {} checksum is {found}, but must be {known}: the file was damaged \
                     or exchanged on the way, and is removed",
                    self.wanted.name,
                    known.name()
                );
                return Err(Fault::last(sentence));
            }
            story.info(&format!("{}: the {} checksum is right", self.wanted.name, known.name()));
        }
        if let Err(error) = self.wanted.form.check(&part(path)) {
            forget(path);
            return Err(Fault::Final(error));
        }
        self.file.sync_all()?;
        fs::rename(part(path), path)?;
        fs::remove_file(note(path)).ok();
        Ok(files::sync_folder(path)?)
    }
}

/// Checks that the volume has room for the rest of a file.
pub(super) fn check_room(path: &Path, file: &File, length: u64) -> Result<(), Fault> {
    let there = file.metadata()?.blocks() * 512;
    let needs = length.saturating_sub(there).saturating_add(MARGIN);
    let folder = path.parent().unwrap_or(path);
    match host::free_space(folder).filter(|free| *free < needs) {
        None => Ok(()),
        Some(free) => {
            let [needs, free] = [needs, free].map(size);
            let what = format!("{}: the download needs {needs}", folder.display());
            Err(Fault::host(format!("{what}, but {free} are free: enlarge the volume")))
        }
    }
}

pub(super) fn no_room(path: &Path, error: &io::Error) -> Fault {
    let out = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": enlarge the volume",
        _ => "",
    };
    Fault::host(format!("{}: {error}{out}", part(path).display()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_content_range_is_read_or_refused() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0, 100)));
        assert_eq!(content_range(" bytes 90-99 / 100 "), Some((90, 100)));
        for bad in [
            "",
            "bytes */100",
            "bytes 0-9/*",
            "bytes 9-0/100",
            "bytes 0-100/100",
            "items 0-9/100",
            "bytes 0-9",
            "bytes -1-9/100",
            "bytes 0-99999999999999999999/99999999999999999999",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
