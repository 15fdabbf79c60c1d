//! The desktop's clipboard: a text, or the files of a folder.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use ironrdp_cliprdr::backend::{ClipboardMessage, CliprdrBackend, CliprdrBackendFactory};
use ironrdp_cliprdr::pdu::{
    ClipboardFileAttributes, ClipboardFormat, ClipboardFormatId, ClipboardFormatName,
    ClipboardGeneralCapabilityFlags, FileContentsFlags, FileContentsRequest, FileContentsResponse,
    FileDescriptor, FormatDataRequest, FormatDataResponse, LockDataId,
};
use ironrdp_server::{CliprdrServerFactory, ServerEvent, ServerEventSender};
use tokio::sync::mpsc::UnboundedSender;

/// How much of a file is asked for at once.
const CHUNK: u32 = 64 << 10;

pub(crate) struct Clipboard {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sender: Option<UnboundedSender<ServerEvent>>,
    text: String,
    /// The paths of the copied files, as in the list that the client got.
    copied: Vec<PathBuf>,
    /// The client's offer.
    offered: Option<ClipboardFormatId>,
}

impl Clipboard {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder, state: Mutex::default() }
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn send(&self, message: ClipboardMessage) {
        let sender = self.with(|state| state.sender.clone());
        if let Some(sender) = sender {
            sender.send(ServerEvent::Clipboard(message)).ok();
        }
    }

    /// Carries out a line of the input.
    pub(crate) fn obey(&self, order: &str) {
        if let Some(text) = order.strip_prefix("text ") {
            self.with(|state| text.clone_into(&mut state.text));
            let format = ClipboardFormat::new(ClipboardFormatId::CF_UNICODETEXT);
            self.send(ClipboardMessage::SendInitiateCopy(vec![format]));
        } else if order == "files" {
            match files_of(&self.folder.join("out"), "") {
                Ok(files) => self.copy(files),
                Err(error) => eprintln!("files: {error:#}"),
            }
        } else if order == "paste" {
            if let Some(format) = self.with(|state| state.offered) {
                self.send(ClipboardMessage::SendInitiatePaste(format));
            }
        } else {
            eprintln!("unknown order {order:?}");
        }
    }

    fn copy(&self, files: Vec<(PathBuf, FileDescriptor)>) {
        let (paths, descriptors) = files.into_iter().unzip();
        self.with(|state| state.copied = paths);
        self.send(ClipboardMessage::SendInitiateFileCopy(descriptors));
    }

    fn read(&self, request: &FileContentsRequest) -> Result<FileContentsResponse<'static>> {
        let path = self.with(|state| {
            let at = usize::try_from(request.index)?;
            state.copied.get(at).cloned().context("no such file")
        })?;
        let mut file = File::open(path)?;
        if request.flags.contains(FileContentsFlags::SIZE) {
            let size = file.metadata()?.len();
            return Ok(FileContentsResponse::new_size_response(request.stream_id, size));
        }
        file.seek(SeekFrom::Start(request.position))?;
        let mut data = Vec::new();
        file.take(request.requested_size.into()).read_to_end(&mut data)?;
        Ok(FileContentsResponse::new_data_response(request.stream_id, data))
    }
}

/// The files and folders of a folder, each folder before its content.
fn files_of(folder: &Path, relative: &str) -> Result<Vec<(PathBuf, FileDescriptor)>> {
    let mut files = Vec::new();
    let mut entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().into_string().ok().context("a name in Unicode")?;
        let (path, data) = (entry.path(), entry.metadata()?);
        let mut file = FileDescriptor::new(&name);
        if !relative.is_empty() {
            file = file.with_relative_path(relative);
        }
        if data.is_dir() {
            let inner = if relative.is_empty() { name } else { format!("{relative}\\{name}") };
            let attributes = ClipboardFileAttributes::DIRECTORY;
            files.push((path.clone(), file.with_attributes(attributes)));
            files.extend(files_of(&path, &inner)?);
        } else {
            files.push((path, file.with_file_size(data.len())));
        }
    }
    Ok(files)
}

pub(crate) struct Factory(pub(crate) Arc<Clipboard>);

impl CliprdrBackendFactory for Factory {
    fn build_cliprdr_backend(&self) -> Box<dyn CliprdrBackend> {
        Box::new(Backend { clipboard: self.0.clone(), wanted: Vec::new(), at: 0, position: 0 })
    }
}

impl ServerEventSender for Factory {
    fn set_sender(&mut self, sender: UnboundedSender<ServerEvent>) {
        self.0.with(|state| state.sender = Some(sender));
    }
}

impl CliprdrServerFactory for Factory {}

/// The clipboard in one connection, and the files that it fetches, one after another.
struct Backend {
    clipboard: Arc<Clipboard>,
    wanted: Vec<FileDescriptor>,
    at: usize,
    position: u64,
}

impl Backend {
    /// Asks for the next piece. Folders and empty files have none.
    fn fetch(&mut self) {
        while let Some(file) = self.wanted.get(self.at) {
            let left = file.file_size.unwrap_or(0).saturating_sub(self.position);
            if left > 0 && !is_folder(file) {
                let requested_size = u32::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
                let request = FileContentsRequest {
                    stream_id: 1,
                    index: self.at.try_into().expect("few files"),
                    flags: FileContentsFlags::RANGE,
                    position: self.position,
                    requested_size,
                    data_id: None,
                };
                self.clipboard.send(ClipboardMessage::SendFileContentsRequest(request));
                return;
            }
            (self.at, self.position) = (self.at + 1, 0);
        }
        println!("pasted files");
    }

    fn place(&self, file: &FileDescriptor) -> PathBuf {
        let relative = file.relative_path.as_deref().unwrap_or_default().replace('\\', "/");
        self.clipboard.folder.join("in").join(relative).join(&file.name)
    }

    /// Makes all folders and empty files.
    fn prepare(&self) -> Result<()> {
        for file in &self.wanted {
            let place = self.place(file);
            if is_folder(file) {
                fs::create_dir_all(place)?;
            } else {
                fs::create_dir_all(place.parent().context("no folder")?)?;
                File::create(place)?;
            }
        }
        Ok(())
    }

    fn store(&mut self, data: &[u8]) -> Result<()> {
        let file = self.wanted.get(self.at).context("no file is fetched")?;
        OpenOptions::new().append(true).open(self.place(file))?.write_all(data)?;
        self.position += data.len() as u64;
        Ok(())
    }
}

fn is_folder(file: &FileDescriptor) -> bool {
    file.attributes.is_some_and(|it| it.contains(ClipboardFileAttributes::DIRECTORY))
}

ironrdp_core::impl_as_any!(Backend);

impl std::fmt::Debug for Backend {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("Backend")
    }
}

impl CliprdrBackend for Backend {
    fn temporary_directory(&self) -> &str {
        ""
    }

    fn client_capabilities(&self) -> ClipboardGeneralCapabilityFlags {
        ClipboardGeneralCapabilityFlags::USE_LONG_FORMAT_NAMES
            | ClipboardGeneralCapabilityFlags::STREAM_FILECLIP_ENABLED
            | ClipboardGeneralCapabilityFlags::FILECLIP_NO_FILE_PATHS
            | ClipboardGeneralCapabilityFlags::CAN_LOCK_CLIPDATA
            | ClipboardGeneralCapabilityFlags::HUGE_FILE_SUPPORT_ENABLED
    }

    fn on_remote_copy(&mut self, available_formats: &[ClipboardFormat]) {
        let files = available_formats.iter().find(|it| {
            it.name().is_some_and(|name| name.value() == ClipboardFormatName::FILE_LIST.value())
        });
        let text = available_formats.iter().find(|it| it.id() == ClipboardFormatId::CF_UNICODETEXT);
        self.clipboard.with(|state| state.offered = files.or(text).map(ClipboardFormat::id));
        if files.is_some() {
            println!("offered files");
        } else if text.is_some() {
            println!("offered text");
        }
    }

    fn on_format_data_request(&mut self, _request: FormatDataRequest) {
        let text = self.clipboard.with(|state| FormatDataResponse::new_unicode_string(&state.text));
        self.clipboard.send(ClipboardMessage::SendFormatData(text));
    }

    fn on_format_data_response(&mut self, response: FormatDataResponse<'_>) {
        match response.to_unicode_string() {
            Ok(text) if !response.is_error() => println!("pasted {text}"),
            _ => eprintln!("the client did not give its text"),
        }
    }

    fn on_remote_file_list(&mut self, files: &[FileDescriptor], _clip_data_id: Option<u32>) {
        (self.wanted, self.at, self.position) = (files.to_vec(), 0, 0);
        match self.prepare() {
            Ok(()) => self.fetch(),
            Err(error) => eprintln!("pasted files: {error:#}"),
        }
    }

    fn on_file_contents_request(&mut self, request: FileContentsRequest) {
        let answer = self.clipboard.read(&request).unwrap_or_else(|error| {
            eprintln!("file {}: {error:#}", request.index);
            FileContentsResponse::new_error(request.stream_id)
        });
        self.clipboard.send(ClipboardMessage::SendFileContentsResponse(answer));
    }

    fn on_file_contents_response(&mut self, response: FileContentsResponse<'_>) {
        if response.is_error() || response.data().is_empty() {
            eprintln!("the client did not give the content of file {}", self.at);
        } else if let Err(error) = self.store(response.data()) {
            eprintln!("pasted files: {error:#}");
        } else {
            self.fetch();
        }
    }

    fn on_ready(&mut self) {}
    fn on_request_format_list(&mut self) {}
    fn on_process_negotiated_capabilities(&mut self, _: ClipboardGeneralCapabilityFlags) {}
    fn on_lock(&mut self, _: LockDataId) {}
    fn on_unlock(&mut self, _: LockDataId) {}
}
