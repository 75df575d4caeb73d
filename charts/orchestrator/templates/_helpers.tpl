{{/* Names, labels and the checks that the schema cannot make. */}}

{{- define "orchestrator.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "orchestrator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "orchestrator.name" .) .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name (include "orchestrator.name" .) | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* Names the Lease, and the Secret that the controller makes for itself: neither is part of the release. */}}
{{- define "orchestrator.leaseName" -}}
{{ include "orchestrator.fullname" . }}-controller
{{- end }}

{{- define "orchestrator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "orchestrator.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{/* Names of what is not in a namespace: two releases of one name in two namespaces must not meet. */}}
{{- define "orchestrator.clusterName" -}}
{{ .Release.Namespace }}-{{ include "orchestrator.fullname" . }}
{{- end }}

{{/* How agents and Prometheus name the controller. */}}
{{- define "orchestrator.host" -}}
{{ include "orchestrator.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "orchestrator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "orchestrator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "orchestrator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "orchestrator.selectorLabels" . }}
{{- end }}

{{- define "orchestrator.image" -}}
{{- $repository := required "image.repository is required: where you have pushed the image of deploy/docker/controller.Dockerfile (--set image.repository=HOST/PATH)" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{/* The namespaces that are watched, as a JSON object {"list": […]}; empty: all. */}}
{{- define "orchestrator.namespaces" -}}
{{- if .Values.watchAllNamespaces -}}
{{- if .Values.watchNamespaces -}}
{{ fail "watchNamespaces and watchAllNamespaces exclude each other: name the namespaces, or watch all" }}
{{- end -}}
{{ dict "list" list | toJson }}
{{- else -}}
{{ dict "list" (default (list .Release.Namespace) .Values.watchNamespaces | uniq) | toJson }}
{{- end -}}
{{- end }}

{{/* What the controller does where it looks after jobs. */}}
{{- define "orchestrator.jobRules" -}}
- apiGroups: [orchestrator.dev]
  resources: [trainingjobs]
  verbs: [list, watch, patch]
- apiGroups: [orchestrator.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [orchestrator.dev]
  resources: [trainingjobs/finalizers] # for owner references that block deletion
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, list, watch, delete]
- apiGroups: [""]
  resources: [secrets] # one per run of a job, found by its label; RBAC cannot narrow it to these
  verbs: [create, list, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [create, get]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, get, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
